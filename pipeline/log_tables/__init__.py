"""What the tables of a change log have in common, whatever their format: locations, columns, files, owners.

``delta`` and ``iceberg`` are the formats. A rule that is the same for both stands here, once. It imports pyarrow, and
deltalake's file system where an object store is asked. What Spark's executors import of it (``locations``,
``columns``, ``parquet_files``) imports pyarrow alone, so that a new Python worker is quick. This file imports nothing.
"""
