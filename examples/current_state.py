"""The tables of a Delta root as they are, or as they were.

    python examples/current_state.py URI TABLE [LSN]

``URI`` is what the sink was given after ``delta:``, and ``TABLE`` is a name such as ``public.orders``.
"""

import sys

from pyspark.sql import SparkSession

from xidstream import ChangeLog


def main(uri, table, lsn=None):
    spark = SparkSession.builder.getOrCreate()
    state = ChangeLog(uri).as_of(spark, lsn=lsn)
    print(f"{table} at {state.lsn}:")
    state[table].show()
    return state[table]


if __name__ == "__main__":
    main(*sys.argv[1:])
