"""Logical messages are kept once, though their LSNs come in two orders."""

from __future__ import annotations

import pyarrow as pa

from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA
from xidstream.pipeline.sinks.message_chunks import new_messages


def messages(*rows: tuple[int | None, int]) -> pa.Table:
    """(commit LSN or None, LSN)"""
    return pa.Table.from_pylist(
        [
            {
                "commit_lsn": c,
                "lsn": n,
                "xid": None,
                "transactional": c is not None,
                "prefix": "p",
                "content": b"",
            }
            for c, n in rows
        ],
        MESSAGES_SCHEMA,
    )


def kept(rows: pa.Table, transactional: int = 0, other: int = 0) -> tuple[list[int], dict[str, int]]:
    new, versions = new_messages(rows, {"t": transactional, "n": other}, "t", "n")
    assert new.schema == MESSAGES_SCHEMA
    return new["lsn"].to_pylist(), versions


def test_each_kind_moves_its_own_watermark() -> None:
    assert kept(messages((None, 50), (100, 20), (None, 60))) == ([50, 20, 60], {"t": 100, "n": 60})


def test_an_old_lsn_of_a_late_commit_is_new_though_later_messages_are_held() -> None:
    assert kept(messages((100, 20)), transactional=90, other=95) == ([20], {"t": 100})


def test_a_replay_keeps_nothing_of_what_is_held() -> None:
    assert kept(messages((None, 50), (100, 20), (None, 60)), 100, 60) == ([], {})


def test_a_replay_cut_differently_keeps_the_rest() -> None:
    assert kept(messages((None, 50), (100, 20), (110, 70), (None, 120)), 100, 60) == (
        [70, 120],
        {"t": 110, "n": 120},
    )


def test_an_lsn_twice_in_one_batch_is_kept_once() -> None:
    assert kept(messages((None, 50), (None, 50)))[0] == [50]
