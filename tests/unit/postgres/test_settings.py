"""SlotSettings: what is refused at construction, and that nothing secret is shown."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.postgres.settings import SlotSettings, Streaming


def make(**options: Any) -> SlotSettings:
    return SlotSettings(**{"dsn": "host=h dbname=d", "slot": "s", "publications": ("p",), **options})


def test_defaults_are_streaming_and_4mb() -> None:
    made = make()
    assert (made.streaming, made.proto_version, made.logical_decoding_work_mem) == (Streaming.ON, None, "4MB")


@pytest.mark.parametrize("slot", ["", "A", "a-b", "a b", 's"', "é", "x" * 64, "s\n"])
def test_slot_name_outside_postgresqls_rule_is_refused(slot: str) -> None:
    with pytest.raises(ConfigError, match="not a slot's name"):
        make(slot=slot)


@pytest.mark.parametrize("publications", [(), ("",), ("a\0b",), ("é" * 32,), ("p", "p")])
def test_publications_that_cannot_be_are_refused(publications: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        make(publications=publications)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("4MB", "4MB"), ("64kB", "64kB"), ("2 GB", "2GB"), ("server", None), (None, None), ("2047GB", "2047GB")],
)
def test_work_mem_sizes_that_postgresql_takes(text: str | None, kept: str | None) -> None:
    assert make(logical_decoding_work_mem=text).logical_decoding_work_mem == kept


@pytest.mark.parametrize("text", ["", "4", "4mb", "63kB", "2048GB", "4MB'; DROP", "-1MB", "1e3kB", "٤MB"])
def test_work_mem_that_is_no_size_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="logical_decoding_work_mem"):
        make(logical_decoding_work_mem=text)


@pytest.mark.parametrize(
    "options",
    [
        {"proto_version": 0},
        {"proto_version": 5},
        {"proto_version": 3, "streaming": Streaming.PARALLEL},
        {"proto_version": 2, "two_phase": True},
        {"query_timeout_s": 0},
    ],
)
def test_combinations_that_no_server_has_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**options)


def test_repr_hides_the_dsn_and_pickling_keeps_it() -> None:
    made = make(dsn="postgresql://u:geheim@h/d")
    assert "geheim" not in repr(made)
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    "dsn",
    ["hust=h password=geheim", "password=geheim geheim", "postgresql://u:geheim%zz@h/d", "host='geheim"],
)
def test_dsn_that_cannot_be_parsed_is_refused_without_being_quoted(dsn: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(dsn=dsn)
    assert "geheim" not in str(caught.value)
    assert caught.value.__suppress_context__
