"""``python -m benchmarks.store_refresh --rows 10000000``: a base table in an object store, and a refresh of one row.

The store is moto's S3 in a process of its own, which counts requests and the bytes that it sends. The log is made here,
in the sink's layout (``benchmarks.mirror``). The first refresh builds the base table, by Spark where it is large. Then
one row is updated, and refreshed, some times. It prints one line of JSON for each: seconds, the CPU seconds of this
process and its peak in megabytes; requests by kind, those for the Parquet files of the base apart; megabytes sent.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from deltalake import DeltaTable

from benchmarks.mirror import MadeLog, local_session
from benchmarks.store_requests import kind_of
from benchmarks.whole_schema import costs
from tests.s3_server import CountedS3, counted_s3, n_bytes_of
from xidstream.actors.mirror import Mirror
from xidstream.pipeline.log_tables.locations import Location


def run(s3: CountedS3, rows: int, repeats: int, folder: Path) -> None:
    root = Location.parse(f"{s3.uri}/shop", s3.options)
    log = MadeLog(folder / "none", root)
    log.snapshot(rows)
    log.update(np.arange(1), 0)
    spark = local_session(folder)
    mirror = Mirror(root.uri, storage_options=s3.options)
    told(s3, "first", lambda: mirror.refresh(spark))
    base = DeltaTable(f"{root.uri}/current/public.accounts", storage_options=s3.options)
    print(json.dumps({"case": "base", "rows": rows, "files": len(base.file_uris())}), flush=True)
    for number in range(1, repeats + 1):
        log.update(np.arange(rows // 3, rows // 3 + 1), number)
        told(s3, "one row", lambda: mirror.refresh(spark))
    spark.stop()


def told(s3: CountedS3, case: str, act: Callable[[], object]) -> None:
    s3.asked()
    found = costs(act)
    asked = s3.asked()
    kinds = Counter(kind for each in asked if (kind := kind_of(each.what)) is not None)
    of_base = [each for each in asked if "/current/public." in each.what and ".parquet" in each.what]
    more = {"requests": dict(kinds), "of_base_files": len(of_base), "sent_mb": n_bytes_of(asked) / 1e6}
    print(json.dumps({"case": case, **found, **more, "load": os.getloadavg()[0]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing"))
    with counted_s3() as s3, tempfile.TemporaryDirectory(prefix="xs-store-") as folder:
        run(s3, options.rows, options.repeats, Path(folder))


if __name__ == "__main__":
    main()
