"""Delta tables as this project writes and reads them: places, columns, files, commits.

It imports deltalake and pyarrow, and never pyspark. What it has in common with other formats is in ``log_tables``.
This file imports nothing.
"""
