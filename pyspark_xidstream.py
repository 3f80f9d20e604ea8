"""Where Spark 4 looks for ``format("xidstream")``: it imports each module whose name begins with ``pyspark_`` and takes
its ``DefaultSource``, so nobody registers anything. The source is ``xidstream.pipeline.changelog.spark_source``."""

from xidstream.pipeline.changelog.spark_source import DefaultSource

__all__ = ["DefaultSource"]
