"""From the setting to the sink, and how a user's function fails."""

from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest

import xidstream
from xidstream.pipeline.errors import (
    Action,
    ComponentLost,
    ConfigError,
    SegmentCorrupt,
    SinkFailed,
    StorageFault,
    UsageError,
)
from xidstream.pipeline.exchange import Batch, SlotIdentity
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.console import ConsoleSink
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.sinks.foreach import ForeachSink, resolve
from xidstream.pipeline.sinks.sink import check_sink_spec, make_sink, sink_type
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark_errors import fault_of

IDENTITY = SlotIdentity(1, "db", "slot")
NOTHING: Any = None
BATCH = SinkBatch(
    Batch(0, (), Lsn(16), Lsn(32), Lsn(32), 0, 0, 0), NOTHING, NOTHING, NOTHING, NOTHING, NOTHING
)


def secret_function(batch: Any) -> None:
    value = 47 * 100 + 11
    raise ValueError(f"row value {value}")


NOT_A_FUNCTION = 3


def test_each_kind_of_sink_is_made() -> None:
    assert isinstance(make_sink("delta:/data", IDENTITY), DeltaSink)
    assert isinstance(make_sink("delta:s3://bucket/x", IDENTITY), DeltaSink)
    assert isinstance(make_sink("console", IDENTITY), ConsoleSink)
    assert isinstance(make_sink("foreach:os.path:join", IDENTITY), ForeachSink)


@pytest.mark.parametrize(
    "spec", ["", "delta", "delta:", "console:x", "foreach", "foreach:", "kafka:x", "delta:ftp://x/y"]
)
def test_a_bad_sink_is_a_config_error(spec: str) -> None:
    with pytest.raises(ConfigError):
        make_sink(spec, IDENTITY)
    with pytest.raises(ConfigError):
        check_sink_spec(spec)


def test_a_checked_setting_means_the_same_in_another_directory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_sink_spec("delta:out") == f"delta:{tmp_path}/out"
    assert check_sink_spec("delta:s3://b/x") == "delta:s3://b/x"
    assert check_sink_spec("console") == "console"
    assert check_sink_spec("foreach:os.path:join") == "foreach:os.path:join"
    with pytest.raises(UsageError):
        check_sink_spec("foreach:os.path:no_such")


@pytest.mark.parametrize(
    ("spec", "storage", "may"),
    [
        ("delta:/data/tables", "/data/segments", True),
        ("delta:/mnt/tables", "file:///data/segments", True),
        ("delta:/data/tables", "s3://bucket/segments", False),
        ("delta:s3://bucket/tables", "/data/segments", False),
        ("delta:s3://bucket/tables", "s3://other/segments", True),
        ("delta:gs://bucket/tables", "gs://bucket/segments", False),
        ("console", "/data/segments", False),
    ],
)
def test_segments_are_written_to_the_last_only_where_they_may_become_files_of_the_tables(
    spec: str, storage: str, may: bool
) -> None:
    """Storage in S3 and tables in a folder: at COMMIT the buffer wrote a file for Spark to read and write again."""
    assert sink_type(spec).may_take_segments(storage) is may


def test_no_message_or_repr_shows_the_credentials_of_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    root = "s3://KEY:hunter2@bucket/x"
    sink = DeltaSink(root, IDENTITY)
    assert repr(sink) == "DeltaSink(s3://bucket/x)"
    with pytest.raises(ConfigError) as unknown:
        make_sink(root, IDENTITY)
    assert "hunter2" not in unknown.value.message
    assert "s3://bucket/x" in unknown.value.message

    def fail(*arguments: Any) -> Any:
        raise RuntimeError(f"cannot open {root}")

    monkeypatch.setattr("xidstream.pipeline.delta.delta_table.DeltaTableWriter.open_or_create", fail)
    with pytest.raises(SinkFailed, match="s3://bucket/x") as opening:
        sink.open(None)  # type: ignore[arg-type]
    sink.close()
    assert "hunter2" not in opening.value.message


def test_sinks_that_cannot_know_what_they_hold_say_nothing() -> None:
    assert make_sink("console", IDENTITY).watermark() == 0
    assert make_sink("foreach:os.path:join", IDENTITY).watermark() == 0


@pytest.mark.parametrize(
    "spec", ["os", "os:", ":join", "no_such_module_xyz:f", "os:no_such", f"{__name__}:NOT_A_FUNCTION"]
)
def test_a_function_that_is_not_there_is_a_usage_error(spec: str) -> None:
    with pytest.raises(UsageError):
        resolve(spec)


def test_a_module_of_the_working_directory_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handlers_of_mine.py").write_text("class H:\n    @staticmethod\n    def take(batch): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert resolve("handlers_of_mine:H.take").__name__ == "take"


def test_a_users_function_gets_what_the_page_promises_and_nothing_beside_it() -> None:
    seen: list[Any] = []
    ForeachSink(seen.append).write(BATCH)
    (batch,) = seen
    assert type(batch) is xidstream.SparkBatch
    assert {name for name in dir(batch) if not name.startswith("_")} == {
        *("tables", "dataframe", "transactions", "messages"),
        *("first_commit_lsn", "last_commit_lsn", "number", "snapshot", "spark"),
    }
    assert (batch.tables, batch.first_commit_lsn, batch.last_commit_lsn, batch.number) == ([], 16, 32, 0)
    assert repr(batch) == "SparkBatch(0/10..0/20, 0 transactions, 0 rows)"


def test_a_failing_function_gives_its_place_and_no_value() -> None:
    with pytest.raises(SinkFailed) as raised:
        ForeachSink(secret_function, "m:secret_function").write(BATCH)
    message = raised.value.message
    assert "ValueError" in message
    assert "in secret_function" in message
    assert "0/10..0/20" in message
    assert "4711" not in message
    assert isinstance(raised.value.__cause__, ValueError)
    assert pickle.loads(pickle.dumps(raised.value)).message == message


def test_a_corrupt_segment_under_the_users_function_stays_a_corrupt_segment() -> None:
    def function(batch: Any) -> None:
        name = f"{SegmentCorrupt.__module__}.SegmentCorrupt"
        raise RuntimeError(f"Job aborted\n ...\n{name}: segment k is torn\n\n\tat org")

    with pytest.raises(SegmentCorrupt, match="segment k"):
        ForeachSink(function).write(BATCH)


def test_the_users_own_files_failing_is_the_functions_failure() -> None:
    def function(batch: Any) -> None:
        raise FileNotFoundError("/home/me")

    with pytest.raises(SinkFailed):
        ForeachSink(function).write(BATCH)


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError("my broker"), EOFError(), BrokenPipeError(), SystemExit(3), OSError(28, "x")],
)
def test_what_the_users_own_clients_raise_is_no_lost_session(error: BaseException) -> None:
    def function(batch: Any) -> None:
        raise error

    with pytest.raises(SinkFailed) as raised:
        ForeachSink(function).write(BATCH)
    assert raised.value.policy.action is Action.STOP


def test_a_session_that_is_gone_is_lost_also_where_the_function_hides_it() -> None:
    from py4j.java_gateway import GatewayParameters, JavaGateway

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))

    def function(batch: Any) -> None:
        try:
            gateway.jvm.System.currentTimeMillis()
        except Exception as error:
            raise RuntimeError("something of mine") from error

    with pytest.raises(ComponentLost):
        ForeachSink(function).write(BATCH)


def test_faults_are_told_apart_without_foreign_messages() -> None:
    assert isinstance(fault_of(OSError(28, "No space left on device"), "writing"), StorageFault)
    assert isinstance(fault_of(ConnectionRefusedError(), "writing"), ComponentLost)
    other = fault_of(RuntimeError("value 4711"), "writing")
    assert isinstance(other, SinkFailed)
    assert "4711" not in other.message
