"""Batches in a Spark session: DataFrames for sinks and users, and the tasks of Spark's executors (the edge of pyspark).

What runs in Spark's executors (``executor_tasks``) imports pyarrow alone, so that a new Python worker is quick. This
file imports nothing for the same reason. ``spark_batch`` is what a user's function sees, ``frames`` what a sink sees.
"""
