"""How far the sink is behind the server, and what the server would keep for it without the journal."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.account.accounts import AT, SLOT, WELL, sequencer
from xidstream.pipeline.account import Account, StoredPart
from xidstream.pipeline.account.model import with_undelivered


def undelivered(account: Account) -> tuple[int | None, int | None]:
    slot = with_undelivered(account).slot
    assert slot is not None
    return slot.undelivered_bytes, slot.wal_held_without_journal_bytes


@pytest.mark.parametrize(
    ("delivered", "expected"),
    [
        ("0/200000", (16 << 20, 16 << 20)),  # the sink is far behind: it is what would hold WAL
        ("0/1000000", (2 << 20, 3 << 20)),  # an open transaction holds more than that
        ("0/1300000", (0, 3 << 20)),  # the server was asked before the sequencer
        (None, (None, None)),  # an older run does not tell
    ],
)
def test_what_the_slot_would_hold_follows_from_what_the_sink_has(
    delivered: str | None, expected: tuple[int | None, int | None]
) -> None:
    assert undelivered(sequencer(delivered_lsn=delivered)) == expected


def test_where_nothing_runs_the_storage_says_what_the_sink_has() -> None:
    stopped = Account(at=AT, run=None, slot=SLOT, stored=StoredPart("0/1000000", "e", (), "0/200000", 3))
    assert undelivered(stopped) == (16 << 20, 16 << 20)
    assert with_undelivered(dataclasses.replace(WELL, slot=None)).slot is None
