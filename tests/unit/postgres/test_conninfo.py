"""The DSN completed, shown and scrubbed; libpq resolves, no server is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.postgres.conninfo import complete, display, parse, scrub

_VARIABLES = ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGPASSWORD", "PGSERVICE", "PGCONNECT_TIMEOUT")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_added_only_where_nothing_is_said() -> None:
    made = conninfo_to_dict(complete("host=h keepalives_idle=5", replication="database"))
    assert made["keepalives_idle"] == "5"
    assert made["connect_timeout"] == "10"
    assert made["tcp_user_timeout"] == "60000"
    assert made["replication"] == "database"
    assert made["fallback_application_name"] == "xidstream"


def test_environment_and_service_are_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "3")
    assert "connect_timeout" not in conninfo_to_dict(complete("host=h"))
    assert "keepalives_idle" not in conninfo_to_dict(complete("service=s"))
    monkeypatch.setenv("PGSERVICE", "s")
    assert "keepalives_idle" not in conninfo_to_dict(complete("host=h"))


def test_users_options_stay_as_they_are() -> None:
    assert conninfo_to_dict(complete("host=h options='-c work_mem=1MB'"))["options"] == "-c work_mem=1MB"


@pytest.mark.parametrize(
    "dsn", ["host=h port=1 user=u dbname=d password=geheim", "postgresql://u:geheim@h:1/d?sslpassword=geheim"]
)
def test_display_tells_where_it_leads_and_no_secret(dsn: str) -> None:
    assert display(dsn) == "host=h port=1 dbname=d user=u"


def test_display_includes_the_environment_but_not_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "from_env")
    monkeypatch.setenv("PGPASSWORD", "geheim")
    shown = display("dbname=d user=u")
    assert shown == "host=from_env port=5432 dbname=d user=u"


def test_display_of_a_service_that_does_not_exist_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSERVICE", "no_such_service")
    monkeypatch.setenv("PGSERVICEFILE", str(Path("/nonexistent")))
    assert "dbname=d" in display("dbname=d")


def test_scrub_removes_every_secret_of_dsn_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "from_env")
    text = scrub("a geheim b from_env c schluessel", "host=h password=geheim sslpassword=schluessel")
    assert text == "a *** b *** c ***"


def test_scrub_decodes_what_a_uri_encodes() -> None:
    assert scrub('failed for "p@ss/word"', "postgresql://u:p%40ss%2Fword@h/d") == 'failed for "***"'


@pytest.mark.parametrize("dsn", ["hots=db dbname=shop", "postgresql://db/shop?hots=x"])
def test_a_misspelt_option_is_named_with_the_one_that_was_meant(dsn: str) -> None:
    with pytest.raises(ConfigError, match="unknown option 'hots'") as caught:
        parse(dsn)
    assert caught.value.remedy == "did you mean host?"


def test_what_may_be_the_end_of_a_password_is_not_named_as_an_option() -> None:
    with pytest.raises(ConfigError, match="an option that libpq does not know") as caught:
        parse("host=db password=correct horse9battery=x")
    assert "battery" not in caught.value.message + caught.value.remedy
    assert "'pass word'" in caught.value.remedy


@pytest.mark.parametrize("dsn", ["postgresql://%aa", "postgresql://u:%ff@h/d", "host=\ud800", "host=a\0b"])
def test_a_dsn_that_is_no_text_is_one_clear_error(dsn: str) -> None:
    """A host of bytes that are no UTF-8, percent-encoded, ended in a UnicodeDecodeError."""
    with pytest.raises(ConfigError, match="must be text in UTF-8, without NUL"):
        parse(dsn)
