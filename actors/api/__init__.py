"""The Python interface: what a PySpark script starts, asks and stops."""
