"""docs/python.md has each public name as its docstring says, and its formulas turn LSNs both ways."""

from __future__ import annotations

import re

import duckdb
import pytest

import xidstream
from tests.lsn_sql import NUMBERS, TEXTS, formulas
from tests.python_reference import PAGE, page_with_reference
from xidstream import ChangeStream, Config, Lsn


def test_the_reference_is_what_the_docstrings_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_reference(page) == page, "run `make docs`"


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    assert set(dir(xidstream)) == set(xidstream.__all__)
    for name in xidstream.__all__:
        assert getattr(xidstream, name) is not None


@pytest.mark.parametrize(("number", "text"), list(zip(NUMBERS, TEXTS, strict=True)))
def test_an_lsn_goes_from_its_number_to_its_text_and_back_in_python(number: int, text: str) -> None:
    assert str(Lsn(number)) == text
    assert int(Lsn.parse(text)) == number


def test_an_lsn_goes_from_its_number_to_its_text_and_back_in_duckdb() -> None:
    to_text, to_number = formulas("duckdb")
    connection = duckdb.connect()
    connection.execute("CREATE TABLE numbers (lsn BIGINT)")
    connection.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in NUMBERS])
    assert connection.sql(to_text).fetchall() == [(text,) for text in TEXTS]
    connection.execute(f"CREATE TABLE texts AS {to_text}")
    assert connection.sql(to_number).fetchall() == [(number,) for number in NUMBERS]


def test_the_examples_of_the_page_are_right() -> None:
    (number,) = set(re.findall(r"\b2\d{7}\b", PAGE.read_text(encoding="utf-8")))
    assert str(Lsn(int(number))) == "0/16B3748"


# -- reprs -----------------------------------------------------------------------------------------------

SETTINGS = {"dsn": "password=geheim dbname=shop", "slot": "shop", "publication": "shop", "storage": "/tmp/x"}


def handle(batch: object) -> None:
    raise AssertionError("nothing is started")


def test_a_stream_shows_its_slot_its_sink_and_its_trigger() -> None:
    stream = ChangeStream(SETTINGS)
    assert repr(stream) == "ChangeStream(slot 'shop' to no sink)"
    assert repr(stream.foreachBatch(handle)) == "ChangeStream(slot 'shop' to foreachBatch(handle))"
    assert repr(stream.toDelta("s3://key:geheim@bucket/tables").trigger(availableNow=True)) == (
        "ChangeStream(slot 'shop' to delta:s3://bucket/tables, availableNow)"
    )
    assert repr(ChangeStream({**SETTINGS, "sink": "console"})) == "ChangeStream(slot 'shop' to console)"


def test_a_config_shows_what_differs_from_the_defaults_and_no_secret() -> None:
    config = Config.of({**SETTINGS, "linger_ms": 20, "spark_conf": {"spark.x": "geheim"}})
    assert repr(config) == (
        "Config(slot='shop', publication=('shop',), storage='/tmp/x', linger_ms=20, spark_conf={'spark.x': '***'})"
    )
    assert repr(Config()) == "Config()"
