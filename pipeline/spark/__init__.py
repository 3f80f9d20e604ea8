"""Batches in a Spark session and the sinks that take them (the edge of pyspark and deltalake; no Ray here).

What runs in Spark's executors (``executor_tasks``) imports pyarrow alone, so that a
new Python worker is quick; this file imports nothing for the same reason. ``spark_batch`` is what a user's
function sees, ``frames`` what a sink sees, ``delta`` the Delta sink, ``sink.make_sink`` the way in for the callers.
"""
