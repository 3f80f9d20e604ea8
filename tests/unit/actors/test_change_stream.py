"""What a stream says of its settings when it is made, and of its session before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream import ChangeStream
from xidstream.pipeline.errors import ConfigError, XidstreamError

SETTINGS = {"dsn": "dbname=shop", "slot": "shop", "publication": "shop", "storage": "/tmp/shop"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_needed_and_missing_is_named_when_the_stream_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named by ``start``, or by libpq, after a session had been made for half a minute."""
    for variable in ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=f"{name} is missing") as caught:
        ChangeStream({key: value for key, value in SETTINGS.items() if key != name})
    assert f"give {name} in the settings of ChangeStream" in caught.value.remedy


def test_the_server_may_come_from_libpqs_variables_as_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "db.example.com")
    without = {key: value for key, value in SETTINGS.items() if key != "dsn"}
    assert repr(ChangeStream(without)) == "ChangeStream(slot 'shop' to no sink)"


def test_a_misspelt_setting_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        ChangeStream({**SETTINGS, "slto": "shop"})
    assert caught.value.remedy == "did you mean slot?"


def test_a_stream_without_a_sink_names_the_calls_that_give_one() -> None:
    with pytest.raises(ConfigError, match="has no sink") as caught:
        ChangeStream(SETTINGS).start(None)  # type: ignore[arg-type]
    assert ".toDelta(uri)" in caught.value.remedy


class ConnectSession:
    """As Spark Connect's, which has no JVM in the driver's process."""

    @property
    def sparkContext(self) -> Any:  # noqa: N802 - Spark's name
        raise NotImplementedError("[NOT_IMPLEMENTED] sparkContext() is not implemented.")


@pytest.mark.parametrize(
    ("session", "says"),
    [(None, "needs a SparkSession, not a NoneType"), (ConnectSession(), "no SparkContext")],
)
def test_what_is_no_session_to_work_with_is_refused_before_anything_is_asked(session: Any, says: str) -> None:
    with pytest.raises(XidstreamError, match=says):
        ChangeStream(SETTINGS).foreachBatch(print).start(session)
