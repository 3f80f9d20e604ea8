"""What is asked of which server version, and the exact text of START_REPLICATION."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream.pipeline.errors import ConfigError, Unsupported
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.settings import SlotSettings, Streaming
from xidstream.pipeline.postgres.stream_options import (
    failover_command,
    server_proto_version,
    start_replication_command,
    stream_options,
    version_text,
)


def make(**options: Any) -> SlotSettings:
    return SlotSettings(**{"dsn": "", "slot": "s", "publications": ("p",), **options})


@pytest.mark.parametrize(
    ("server", "proto"),
    [(100_000, 1), (130_011, 1), (140_000, 2), (150_018, 3), (160_014, 4), (180_004, 4), (190_000, 4)],
)
def test_highest_protocol_of_each_server(server: int, proto: int) -> None:
    assert server_proto_version(server) == proto


def test_server_before_10_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"9\.6\.24 has no pgoutput"):
        server_proto_version(90_624)
    assert version_text(160_014) == "16.14"


def test_command_with_everything() -> None:
    made = make(
        slot="1st",
        publications=('a"b', "it's", "a\\b"),
        streaming=Streaming.PARALLEL,
        two_phase=True,
    )
    assert start_replication_command("1st", Lsn.parse("1/A2"), stream_options(made, 180_004)) == (
        'START_REPLICATION SLOT "1st" LOGICAL 1/A2 ('
        "proto_version '4', "
        """publication_names '"a""b","it''s","a\\b"', """
        "streaming 'parallel', messages 'true', two_phase 'on')"
    )


def test_command_for_an_old_server_asks_for_nothing_it_has_not() -> None:
    assert start_replication_command("s", INVALID_LSN, stream_options(make(), 100_023)) == (
        """START_REPLICATION SLOT "s" LOGICAL 0/0 (proto_version '1', publication_names '"p"')"""
    )


def test_two_phase_is_asked_for_only_when_it_was() -> None:
    assert "two_phase" not in stream_options(make(), 180_000).text()
    assert "binary" not in stream_options(make(two_phase=True), 180_000).text()


def test_default_streaming_falls_back_where_there_is_none() -> None:
    assert stream_options(make(), 130_000).streaming is Streaming.OFF
    assert stream_options(make(proto_version=1), 180_000).streaming is Streaming.OFF
    assert stream_options(make(proto_version=2), 180_000).streaming is Streaming.ON
    assert stream_options(make(), 140_000).streaming is Streaming.ON


@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({"streaming": Streaming.PARALLEL}, 150_000),
        ({"two_phase": True}, 140_000),
        ({"proto_version": 4}, 150_000),
    ],
)
def test_what_was_asked_for_by_name_and_is_not_there_is_unsupported(
    options: dict[str, Any], server: int
) -> None:
    with pytest.raises(Unsupported) as caught:
        stream_options(make(**options), server)
    assert caught.value.remedy


def test_slot_name_is_checked_again_where_the_command_is_made() -> None:
    with pytest.raises(ConfigError):
        start_replication_command('s" LOGICAL 0/0; --', INVALID_LSN, stream_options(make(), 180_000))


def test_a_failover_slot_needs_postgresql_17() -> None:
    assert failover_command("s", 170000) == 'ALTER_REPLICATION_SLOT "s" (FAILOVER true)'
    with pytest.raises(Unsupported, match="PostgreSQL 17"):
        failover_command("s", 169999)
