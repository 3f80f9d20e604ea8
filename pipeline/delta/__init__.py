"""Delta tables as this project writes and reads them: places, columns, files, commits.

It imports deltalake and pyarrow, and never pyspark. What Spark's executors import of it (``locations``, ``columns``,
``parquet_files``) imports pyarrow alone, so that a new Python worker is quick. This file imports nothing.
"""
