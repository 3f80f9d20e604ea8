"""Iceberg tables as this project writes and reads them: catalogs, columns, commits, upkeep.

It imports pyiceberg, which comes with the extra ``iceberg``, and pyarrow, and never pyspark. What it has in common with
other formats is in ``log_tables``. This file imports nothing.
"""
