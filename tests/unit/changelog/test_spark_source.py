"""What Spark 4 asks of the source, without a JVM: options, offsets, and the partitions between two of them."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.s3_server import S3Server
from tests.unit.changelog.made_log import Log
from xidstream.pipeline.errors import ConfigError, PreconditionMissing, Unsupported

pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no Python data sources")

from xidstream.pipeline.changelog.spark_source import (
    DefaultSource,
    LogSource,
    ReadAllAvailable,
    SourceOptions,
    StreamReader,
)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(str(tmp_path))


def parsed(**options: str) -> SourceOptions:
    return SourceOptions.parse({"path": "/log", **options})


def test_options_have_no_case_and_lsns_are_exclusive_or_inclusive_as_their_names_say() -> None:
    found = parsed(
        TABLE="public.t", SINCE="0/10", endinglsn="32", FailOnDataLoss="FALSE", **{"storage.aws_region": "x"}
    )
    assert (found.tables, found.since, found.until) == (("public.t",), 16, 32)
    assert (found.fail_on_data_loss, found.storage_options) == (False, {"AWS_REGION": "x"})
    assert parsed(table="public.t", startingLsn="0/10", until="0/20").since == 15
    assert parsed(table="public.t", startingLsn="0").since == 0
    with pytest.raises(ConfigError, match="one of the options since and startingLsn"):
        parsed(table="public.t", since="1", startingLsn="1")


@pytest.mark.parametrize(
    ("options", "tables"),
    [
        ({"table": "public.t"}, ("public.t",)),
        ({"table": '["a.b", "c,d"]'}, (("a.b", "c,d"),)),
        ({"tables": "public.t, public.u,public.t"}, ("public.t", "public.u")),
        ({"tables": '["public.t", ["a.b", "c,d"]]'}, ("public.t", ("a.b", "c,d"))),
    ],
)
def test_tables_are_names_or_json_where_a_name_has_a_comma_or_a_dot(
    options: dict[str, str], tables: Any
) -> None:
    assert parsed(**options).tables == tables


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"table": "public.t", "tables": "public.u"},
        {"tables": ""},
        {"table": "[1, 2]"},
        {"table": "[not json"},
        {"tables": '[["a.b", "c"], ["a", "b.c"]]'},
        {"table": "public.t", "maxBytesPerTrigger": "0"},
        {"table": "public.t", "maxTransactionsPerTrigger": "many"},
        {"table": "public.t", "path": ""},
    ],
)
def test_options_that_say_nothing_or_two_things_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        parsed(**options)


def reader(log: Log, **options: str) -> StreamReader:
    """As Spark makes one in each process."""
    given = {"path": log.uri, "table": "public.t", **options}
    made = DefaultSource(given)
    return pickle.loads(pickle.dumps(made.streamReader(made.schema())))


def ids(stream: StreamReader, start: int, end: int) -> list[int]:
    parts = pickle.loads(pickle.dumps(stream.partitions({"lsn": start}, {"lsn": end})))
    other = pickle.loads(pickle.dumps(stream))
    return sorted(row["id"] for part in parts for batch in other.read(part) for row in batch.to_pylist())


def test_offsets_are_lsns_of_complete_commits_from_before_the_oldest_to_the_newest(log: Log) -> None:
    log.commit(10, ["id"], id=[1, 2])
    log.commit(20, id=[3])
    stream = reader(log)
    assert stream.initialOffset() == {"lsn": 9}
    assert reader(log, since="0/A").initialOffset() == {"lsn": 10}
    assert stream.latestOffset({"lsn": 9}, ReadAllAvailable()) == {"lsn": 20}
    assert stream.latestOffset() == {"lsn": 20}
    assert ids(stream, 9, 20) == [1, 2, 3] and ids(stream, 10, 20) == [3]
    log.commit(30, id=[4])
    # The same again, as after a crash, though the log has grown.
    assert ids(stream, 9, 20) == [1, 2, 3]
    assert stream.latestOffset({"lsn": 20}, ReadAllAvailable()) == {"lsn": 30}
    stream.prepareForTriggerAvailableNow()
    log.commit(40, id=[5])
    assert stream.latestOffset({"lsn": 20}, ReadAllAvailable()) == {"lsn": 30}
    assert stream.latestOffset({"lsn": 30}, ReadAllAvailable()) == {"lsn": 30}


def test_rows_ahead_of_their_transaction_are_left_out(log: Log) -> None:
    log.commit(10, ["id"], id=[1])
    log.write(20, id=[2])  # The sink is between the table and _transactions.
    stream = reader(log)
    assert stream.latestOffset({"lsn": 9}, ReadAllAvailable()) == {"lsn": 10}
    assert ids(stream, 9, 10) == [1]


def test_limits_are_kept_where_spark_asks_for_them(log: Log) -> None:
    for lsn in (10, 20, 30):
        log.commit(lsn, ["id"] if lsn == 10 else None, id=[lsn])
    stream = reader(log, maxTransactionsPerTrigger="2")
    limit = stream.getDefaultReadLimit()
    assert stream.latestOffset({"lsn": 9}, limit) == {"lsn": 20}
    assert stream.latestOffset({"lsn": 9}, ReadAllAvailable()) == {"lsn": 30}
    assert reader(log).getDefaultReadLimit() == ReadAllAvailable()
    stream = reader(log, maxBytesPerTrigger="1")
    assert stream.latestOffset({"lsn": 10}, stream.getDefaultReadLimit()) == {"lsn": 20}


def test_a_change_of_columns_is_read_up_to_and_then_told_with_its_lsn(log: Log) -> None:
    log.commit(10, ["id"], id=[1])
    stream = reader(log)
    log.commit(20, id=[2])
    log.commit(30, ["id", "note"], id=[3], note=["n"])
    assert stream.latestOffset({"lsn": 10}, ReadAllAvailable()) == {"lsn": 29}
    assert ids(stream, 10, 29) == [2]
    with pytest.raises(Unsupported, match="other columns from the commit at 0/1E on") as told:
        stream.latestOffset({"lsn": 29}, ReadAllAvailable())
    assert told.value.facts == {"lsn": "0/1E"}
    assert ids(reader(log), 29, 30) == [3]


def test_a_query_that_goes_on_with_older_columns_behind_its_checkpoint_is_refused_and_doubles_nothing(
    log: Log,
) -> None:
    log.commit(10, ["id"], id=[1])
    stream = reader(log)
    log.commit(30, ["id", "note"], id=[3], note=["n"])
    # Spark before 4.2 does not say that the checkpoint is at 30.
    end = stream.latestOffset()
    assert end == {"lsn": 29}
    with pytest.raises(Unsupported, match=r"all changes up to 0/1E, .* up to 0/1D only"):
        stream.partitions({"lsn": 30}, end)


def test_a_beginning_that_is_gone_is_an_error(log: Log) -> None:
    for lsn in (10, 20, 30):
        log.commit(lsn, ["id"] if lsn == 10 else None, id=[lsn])
    assert ids(reader(log), 9, 30) == [10, 20, 30]
    DeltaTable(f"{log.uri}/public.t").delete("_commit_lsn <= 10")
    assert ids(reader(log), 10, 30) == [20, 30]
    with pytest.raises(PreconditionMissing, match=r"table public\.t lacks the rows of the commit at 0/A"):
        reader(log).partitions({"lsn": 9}, {"lsn": 30})
    assert ids(reader(log, failOnDataLoss="false"), 9, 30) == [20, 30]
    DeltaTable(f"{log.uri}/_transactions").delete("commit_lsn <= 10")
    with pytest.raises(
        PreconditionMissing, match=r"changes after 0/9 are missing: the change log begins at 0/14"
    ):
        reader(log).partitions({"lsn": 9}, {"lsn": 30})
    assert ids(reader(log), 19, 30) == [20, 30]


def serve_s3(connection: Connection) -> None:
    """In a process of its own: deltalake waits for an answer with the interpreter's lock in hand."""
    server = S3Server()
    connection.send((server.port, server.bucket))
    with suppress(EOFError):
        connection.recv()


@pytest.fixture
def s3() -> Iterator[Log]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_s3, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    port, bucket = ours.recv()
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }
    yield Log(f"s3://{bucket}/root", options)
    ours.close()
    process.join(10)
    process.terminate()


def test_a_log_in_a_store_is_read_with_the_options_of_the_store(s3: Log) -> None:
    s3.commit(10, ["id"], id=[1, 2])
    s3.commit(20, id=[3])
    assert s3.options is not None
    stream = reader(s3, **{f"storage.{name.lower()}": value for name, value in s3.options.items()})
    assert stream.latestOffset(stream.initialOffset(), ReadAllAvailable()) == {"lsn": 20}
    assert ids(stream, 9, 20) == [1, 2, 3]


def test_no_credential_leaves_the_options(log: Log) -> None:
    log.commit(10, ["id"], id=[1])
    options = SourceOptions.parse(
        {"path": log.uri, "table": "public.t", "storage.aws_secret_access_key": "hush"}
    )
    source = LogSource(options)
    assert "hush" not in repr(options)
    assert b"hush" not in pickle.dumps(source.ranges(source.tables(source.until()), 0, 10))
