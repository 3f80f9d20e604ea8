"""What one transaction did: each row that it changed, in every table, as it was before and as it was then.

python examples/audit.py URI XID
"""

import sys

from pyspark.sql import SparkSession

from xidstream import ChangeLog


def main(uri, xid):
    spark = SparkSession.builder.getOrCreate()
    log = ChangeLog(uri)
    lsn = log.as_of(spark, xid=int(xid)).lsn
    before, after = log.as_of(spark, lsn=lsn.before), log.as_of(spark, lsn=lsn)
    (transaction,) = log.transactions(spark).filter(f"commit_lsn = {int(lsn)}").collect()
    print(
        f"transaction {transaction.xid} committed at {lsn}, {transaction.commit_timestamp}: {transaction.rows} rows"
    )
    found = {}
    for table in transaction.tables:
        # Whole rows: EXCEPT ALL keeps rows that are there more than once.
        found[table] = (
            before[table].exceptAll(after[table]),
            after[table].exceptAll(before[table]),
            log.changes(spark, table, since=lsn.before, until=lsn).orderBy("_seq"),
        )
        for title, rows in zip(("before", "after", "change by change"), found[table], strict=True):
            print(f"{table}, {title}:")
            rows.show(truncate=False)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
