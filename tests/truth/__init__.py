"""Whether a state of the log is what the source held: random DDL and DML beside a real run, read at once.

``source`` makes the steps and knows the truth, ``watching`` reads the log and judges, ``__main__`` is the long run.
"""
