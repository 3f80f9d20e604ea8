"""Settings are shown to people: in a ``repr``, in a message. What is secret in them is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import holds_credentials, redacted
from xidstream.pipeline.settings.settings_file import load_toml
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.settings.times import parse_time, time_text

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("/plain/path@x", "/plain/path@x"),
        ("relative", "relative"),
        ("", ""),
        ("file:///a/b", "file:///a/b"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("s3://KEY:hunter2@bucket/x", "s3://bucket/x"),
        ("s3://KEY:hun/hunter2+@bucket/x?region=r", "s3://bucket/x"),
        ("s3://bucket/x?secret_key=hunter2&access_key=k", "s3://bucket/x"),
        ("abfs://container@account/x?account_key=hunter2", "abfs://account/x"),
        ("delta:s3://KEY:hunter2@bucket/x", "delta:s3://bucket/x"),
        ("delta:/tables@home", "delta:***"),
        ("foreach:module:function", "foreach:module:function"),
        # Not percent-encoded: which part is secret can only be guessed.
        ("s3://KEY:hun?hunter2@bucket/x", "s3:***"),
        ("s3://KEY:h@n?hunter2@bucket/x", "s3:***"),
        ("s3:KEY:hunter2@bucket", "s3:***"),
        ("KEY:hunter2@bucket", "KEY:***"),
    ],
)
def test_a_uri_is_shown_without_what_may_be_secret(uri: str, shown: str) -> None:
    assert redacted(uri) == shown
    assert SECRET not in shown


def test_no_secret_of_a_setting_is_in_its_repr() -> None:
    config = Config(
        dsn=f"host=db password={SECRET}",
        slot="orders",
        storage=f"s3://KEY:{SECRET}@bucket/x?region=r",
        sink=f"delta:s3://KEY:{SECRET}@tables/x",
        spark_conf={"spark.hadoop.fs.s3a.secret.key": SECRET},
    )
    shown = repr(config)
    assert SECRET not in shown
    assert "dsn" not in shown
    assert "slot='orders'" in shown
    assert "storage='s3://bucket/x'" in shown
    assert "sink='delta:s3://tables/x'" in shown
    assert "spark.hadoop.fs.s3a.secret.key" in shown


@pytest.mark.parametrize(
    "uri",
    [
        "s3://KEY:hunter2@bucket/x",
        "s3://KEY:hun/hunter2+@bucket/x?region=r",
        "s3://KEY:hun?hunter2@bucket/x",
        "s3://bucket/x?region=r&secret_key=hunter2",
        "abfs://container@account/x?account_key=hunter2",
        "abfss://container@account/x?sv=1&sig=hunter2",
    ],
)
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    assert holds_credentials(uri)
    assert holds_credentials(f"delta:{uri}")
    for config in (Config(storage=uri), Config(sink=f"delta:{uri}")):
        with pytest.raises(ConfigError, match="holds credentials") as caught:
            config.refuse_credentials()
        assert SECRET not in caught.value.message + caught.value.remedy
        assert "environment" in caught.value.remedy


def test_a_setting_of_spark_that_looks_secret_is_refused_by_its_name() -> None:
    Config(spark_conf={"spark.ui.enabled": "true"}).refuse_credentials()
    with pytest.raises(ConfigError, match=r"spark\.hadoop\.fs\.s3a\.secret\.key") as caught:
        Config(spark_conf={"spark.hadoop.fs.s3a.secret.key": SECRET}).refuse_credentials()
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/data/a:b@c",
        "relative:x",
        "file:///a/b",
        "s3://bucket/x?endpoint_override=127.0.0.1%3A9000&scheme=http",
        "abfs://container@account.dfs.core.windows.net/x",
        "gs://anonymous@bucket/x",
        "foreach:module:function",
        "console",
    ],
)
def test_a_uri_without_credentials_may_travel(uri: str) -> None:
    assert not holds_credentials(uri)
    assert not holds_credentials(f"delta:{uri}")


SLOTS: dict[str, Any] = {
    "storage": "/segments",
    "buffers_max": 8,
    "slots": [
        {"slot": "a", "dsn": "dbname=a", "publication": "p", "sink": "delta:/a"},
        {"slot": "b", "dsn": "dbname=b", "publication": "q", "sink": "delta:/b", "linger-ms": 5},
    ],
}


def test_each_of_slots_has_its_own_settings_and_the_files_others() -> None:
    a, b = configs_of(SLOTS, {"available_now": True})
    assert (a.slot, a.dsn, a.sink, a.linger_ms) == ("a", "dbname=a", "delta:/a", 10)
    assert (b.slot, b.publication, b.linger_ms) == ("b", ("q",), 5)
    assert {(c.storage, c.buffers_max, c.available_now) for c in (a, b)} == {("/segments", 8, True)}
    assert [c.slot for c in configs_of(SLOTS, {"slot": "b"})] == ["b"]
    assert [c.slot for c in configs_of({"slot": "x"}, {"slot": "y"})] == ["y"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": []}, "list of tables"),
        ({"slots": {"slot": "a"}}, "list of tables"),
        ({"slot": "c"}, "beside"),
        ({"slots": [{"slot": "a"}, {"dsn": "x"}]}, "slot is missing"),
        ({"slots": [{"slot": "a"}, {"slot": "a"}]}, "the same slot"),
        ({"sink": "delta:/x/", "slots": [{"slot": "a", "sink": "delta:/x"}, {"slot": "b"}]}, "the same sink"),
        ({"buffers_max": 4, "slots": [{"slot": "a", "buffers_min": 4}, {"slot": "b"}]}, r"together \(5\)"),
        ({"slots": [{"slot": "a", "buffers-max": 3}]}, "buffers_max is for the whole run"),
        ({"slots": [{"slot": "a", "spark_executors": 3}]}, "spark_executors is for the whole run"),
        ({"slots": [{"slot": "a", "spark": "local"}]}, "spark is for the whole run"),
        ({"slots": [{"slot": "a", "sloth": 3}]}, "unknown setting 'sloth'"),
    ],
)
def test_slots_that_cannot_be_in_one_run_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configs_of({**SLOTS, **change}, {})
    with pytest.raises(ConfigError, match="named 'z'"):
        configs_of(SLOTS, {"slot": "z"})
    with pytest.raises(ConfigError, match="a list of slots"):
        Config.of(SLOTS)


def test_a_buffers_resource_is_a_custom_one() -> None:
    assert Config(buffer_resource="txn_buffer").buffer_resource == "txn_buffer"
    with pytest.raises(ConfigError, match="custom"):
        Config(buffer_resource="CPU")


@pytest.mark.parametrize(
    "settings",
    [
        {"slot": "A"},
        {"streaming": "yes"},
        {"proto_version": 5},
        {"proto_version": 3, "streaming": "parallel"},
        {"proto_version": 2, "two_phase": True},
        {"logical_decoding_work_mem": "63kB"},
        {"logical_decoding_work_mem": "4M"},
        {"logical_decoding_work_mem": "4096GB"},
    ],
    ids=str,
)
def test_what_no_server_takes_is_refused_when_the_settings_are_read(settings: dict[str, Any]) -> None:
    """And not later, by the reader, when Ray and Spark have been started."""
    with pytest.raises(ConfigError):
        Config.of(settings)


@pytest.mark.parametrize("memory", ["10", "512", "512mb ", "0.5g", "1 g", "10m", "449m", "lots", "", "٥00m"])
def test_an_executors_memory_without_a_unit_or_too_small_for_spark_is_refused(memory: str) -> None:
    with pytest.raises(ConfigError, match="spark_executor_memory must be a size of 450m or more") as caught:
        Config(spark_executor_memory=memory)
    assert "512m" in caught.value.remedy


@pytest.mark.parametrize("memory", ["450m", "512M", "512mb", "460800k", "2g", "1t"])
def test_an_executors_memory_is_written_as_spark_writes_it(memory: str) -> None:
    assert Config(spark_executor_memory=memory).spark_executor_memory == memory


def test_a_server_is_given_two_status_intervals_to_answer() -> None:
    with pytest.raises(ConfigError, match=r"receive_timeout_ms \(100\) is below two intervals") as caught:
        Config(receive_timeout_ms=100)
    assert "20000 or more" in caught.value.remedy
    assert Config(receive_timeout_ms=1000, status_interval_ms=500).receive_timeout_ms == 1000
    assert Config(receive_timeout_ms=0).receive_timeout_ms == 0


def test_the_remedy_of_a_wrong_setting_leads_to_the_list_of_settings() -> None:
    with pytest.raises(ConfigError, match="linger_ms must be from 0 to 60000, got -1") as caught:
        Config(linger_ms=-1)
    assert "xidstream run --help-all" in caught.value.remedy and "docs/settings.md" in caught.value.remedy


def test_a_missing_dsn_is_told_where_no_variable_of_libpq_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="dsn is missing"):
        Config(slot="s").require("dsn", "slot")
    monkeypatch.setenv("PGSERVICE", "shop")
    Config(slot="s").require("dsn", "slot")


def test_a_file_that_cannot_be_read_and_one_that_is_no_toml_have_remedies_of_their_own(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="cannot read") as missing:
        load_toml(tmp_path / "absent.toml")
    assert "path" in missing.value.remedy
    (tmp_path / "broken.toml").write_text("slot = s")
    with pytest.raises(ConfigError, match="not valid TOML") as broken:
        load_toml(tmp_path / "broken.toml")
    assert "correct the file" in broken.value.remedy


def test_heartbeats_that_would_flood_the_source_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"heartbeat_interval_s must be 0 or at least 0\.1"):
        Config(heartbeat_interval_s=1e-6)


def test_a_lost_slot_is_put_right_only_with_new_snapshots() -> None:
    assert Config(on_slot_lost="resync").on_slot_lost == "resync"
    with pytest.raises(ConfigError, match="on_slot_lost must be stop or resync"):
        Config(on_slot_lost="heal")
    for snapshot in ("never", "only"):
        with pytest.raises(ConfigError, match="takes new snapshots of all tables"):
            Config(on_slot_lost="resync", snapshot=snapshot)


@pytest.mark.parametrize("text", ["30min", "90min", "367d", "0h", "x"])
def test_what_delta_tables_keep_is_a_number_of_hours(text: str) -> None:
    assert Config(delta_file_retention="7d").delta_retention.files_h == 168
    with pytest.raises(ConfigError, match="delta_log_retention must be"):
        Config(delta_log_retention=text)


@pytest.mark.parametrize("value", ["11s", "1min", "-1s", "x"])
def test_iceberg_commits_are_seconds_apart_at_most(value: str) -> None:
    assert Config().sink_settings.commit_every_s == 1
    assert Config(iceberg_commit_every="250ms").sink_settings.commit_every_s == 0.25
    with pytest.raises(ConfigError, match="iceberg_commit_every"):
        Config(iceberg_commit_every=value)


@pytest.mark.parametrize(
    ("setting", "given", "found"),
    [
        ("linger_ms", 20, 20),
        ("linger_ms", "20", 20),
        ("linger_ms", "20ms", 20),
        ("linger_ms", "0.02 s", 20),
        ("linger_ms", "1.001s", 1_001),
        ("linger_ms", "1min", 60_000),
        ("linger_ms", "0", 0),
        ("buffers_idle_s", "250ms", 0.25),
        ("buffers_idle_s", "1.5", 1.5),
        ("buffers_idle_s", "1h", 3_600.0),
        ("receive_timeout_ms", "2min", 120_000),
    ],
)
def test_a_time_is_written_with_a_unit_or_as_a_number_of_the_unit_in_its_name(
    setting: str, given: object, found: float
) -> None:
    (value,) = {getattr(Config.of({setting: given}), setting)}
    assert value == found and isinstance(value, int) == setting.endswith("_ms")


@pytest.mark.parametrize(
    "settings",
    [
        {"linger_ms": "soon"},
        {"linger_ms": "10 weeks"},
        {"linger_ms": "0.5ms"},
        {"linger_ms": "-1"},
        {"linger_ms": "1h"},
        {"linger_ms": 1.5},
        {"linger_ms": True},
        {"buffers_idle_s": "nan"},
        {"buffers_idle_s": float("nan")},
        {"journal_after_s": "2d"},
        {"mirror_every": "60"},
    ],
)
def test_a_time_that_is_none_or_out_of_its_bounds_is_refused_by_the_settings_name(
    settings: dict[str, Any],
) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"^{name} must be"):
        Config.of(settings)


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (10, "linger_ms", "10ms"),
        (2_000, "stream_linger_ms", "2s"),
        (60_000, "receive_timeout_ms", "1min"),
        (90_000, "receive_timeout_ms", "90s"),
        (0.25, "journal_after_s", "250ms"),
        (86_400.0, "journal_after_s", "1d"),
        (0.0, "heartbeat_interval_s", "0"),
    ],
)
def test_a_default_time_is_shown_as_people_write_it_and_reads_as_itself(
    value: float, name: str, text: str
) -> None:
    assert time_text(value, name) == text
    assert parse_time(text, name) == value
