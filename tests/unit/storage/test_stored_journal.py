"""What the storage alone tells of a journal: nothing of one that is whole, and what and where of one that is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pyarrow as pa
import pytest

from tests.unit.storage.journals import Made, made_journal
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import (
    JournalFinding,
    findings,
    slots_servers,
    stored_journal,
)


@pytest.fixture
def made(storage, layout, relation) -> Made:
    return made_journal(storage, layout, relation)


def found_in(made: Made) -> list[JournalFinding]:
    """And nothing is changed."""
    storage, root = made.storage, made.layout.root
    before = {key: storage.read_bytes(key) for key in storage.list_keys(root)}
    journal = stored_journal(storage, made.layout, verify=True)
    assert journal is not None
    found = list(findings(journal))
    assert before == {key: storage.read_bytes(key) for key in storage.list_keys(root)}
    return found


def test_a_journal_that_is_whole_has_no_finding_and_tells_what_is_in_it(made: Made) -> None:
    assert found_in(made) == []
    for verify in (False, True):
        journal = stored_journal(made.storage, made.layout, verify=verify)
        assert journal is not None
        assert list(journal.readable) == made.files and journal.unnamed == ()
        assert [named.number for named in journal.files] == [3, 4, 5, 7]


def test_an_empty_journal_is_whole_and_no_record_is_none(storage, layout, made: Made) -> None:
    made.record(0x4100, 0x4100)
    assert found_in(made) == []
    other = Layout(layout.system_identifier, "other", layout.epoch)
    assert stored_journal(storage, other, verify=True) is None
    assert slots_servers(storage, "other") == []
    assert slots_servers(storage, layout.slot) == [layout.system_identifier]


def test_a_file_that_the_record_does_not_name_is_no_part_of_it(made: Made) -> None:
    made.write(8, 0x5000)
    journal = stored_journal(made.storage, made.layout, verify=True)
    assert journal is not None and journal.unnamed == (made.key(8),)
    assert found_in(made) == []


def remove_file(made: Made) -> str:
    made.storage.delete([made.key(4)])
    return "missing"


def alter_file(made: Made) -> str:
    """A byte of its rows, where reading the directory alone does not see it."""
    data = bytearray(made.storage.read_bytes(made.key(4)))
    data[200] ^= 1
    made.storage.write_bytes(made.key(4), bytes(data))
    journal = stored_journal(made.storage, made.layout, verify=False)
    assert journal is not None and all(named.damage is None for named in journal.files)
    return "damaged"


def cut_file(made: Made) -> str:
    made.storage.write_bytes(made.key(4), made.storage.read_bytes(made.key(4))[:-100])
    return ""


def remove_segment(made: Made) -> str:
    (key,) = made.files[1].stored_keys
    made.storage.delete([key])
    return "0.parquet"


def alter_segment(made: Made) -> str:
    (key,) = made.files[1].stored_keys
    data = bytearray(made.storage.read_bytes(key))
    data[100] ^= 1
    made.storage.write_bytes(key, bytes(data))
    return "0.parquet"


@pytest.mark.parametrize(
    "damage", [remove_file, alter_file, cut_file, remove_segment, alter_segment], ids=lambda f: f.__name__
)
def test_a_damaged_file_is_named_with_the_commits_that_are_lost_and_what_to_do(
    made: Made, damage: Callable[[Made], str]
) -> None:
    text = damage(made)
    (finding,) = found_in(made)
    assert finding.key == made.key(4) and text in finding.statement
    assert (finding.after_lsn, finding.to_lsn) == (Lsn(0x1100), Lsn(0x3FFF)), (
        "between its neighbours' commits"
    )
    assert "restore the object" in finding.remedy


def test_the_first_and_the_last_file_are_bounded_by_what_is_delivered_and_confirmed(made: Made) -> None:
    made.storage.delete([made.key(3), made.key(7)])
    first, last = found_in(made)
    assert (first.after_lsn, first.to_lsn) == (Lsn(0x1000), Lsn(0x1FFF))
    assert (last.after_lsn, last.to_lsn) == (Lsn(0x2000), Lsn(0x4100))


@pytest.mark.parametrize(
    ("confirmed", "delivered", "spans", "number", "text"),
    [
        (0x4020, 0x1000, [(3, 5), (7, 7)], 7, "only what comes before 0/4020 is confirmed"),
        (0x4100, 0x1131, [(3, 5), (7, 7)], 3, "the sink has everything up to 0/1131"),
        (0x4100, 0x1000, [(3, 3), (7, 7), (4, 4)], 4, "a file before it ends with 0/4000"),
    ],
)
def test_a_file_that_is_not_between_the_positions_or_out_of_order_is_found(
    made: Made, confirmed: int, delivered: int, spans: list[tuple[int, int]], number: int, text: str
) -> None:
    made.storage.delete([made.layout.record_key(1)])
    made.record(confirmed, delivered, *spans)
    assert [text in finding.statement for finding in found_in(made) if finding.key == made.key(number)] == [
        True
    ]


def test_a_record_that_cannot_be_right_is_found(made: Made) -> None:
    for delivered, spans, text in (
        (0x4101, [], "more delivered than confirmed"),
        (0x1000, [], "names no file"),
        (0x1000, [(3, 3), (7, 7), (4, 4)], "do not rise"),
    ):
        made.record(0x4100, delivered, *spans)
        statements = [f.statement for f in found_in(made) if f.key == made.layout.record_key(1)]
        assert len(statements) == 1 and text in statements[0]


def test_what_a_run_delivers_and_deletes_meanwhile_is_no_finding(made: Made) -> None:
    class Meanwhile(Storage):
        """The run delivers the first file right after the record was read."""

        is_due = True

        def read_buffer(self, key: str, start: int = 0) -> pa.Buffer | None:
            if self.is_due and key == made.key(3):
                self.is_due = False
                made.record(0x4100, 0x1130, (4, 5), (7, 7))
                made.storage.delete([key])
            return super().read_buffer(key, start)

    journal = stored_journal(Meanwhile(made.storage.uri), made.layout, verify=True)
    assert journal is not None and [named.number for named in journal.files] == [4, 5, 7]
    assert list(findings(journal)) == []


def test_a_file_of_another_slot_in_its_place_is_found(made: Made) -> None:
    other = dataclasses.replace(made.layout, slot="other")
    elsewhere = Made(made.storage, other, made.relation)
    elsewhere.write(4, 0x2000)
    made.storage.write_bytes(made.key(4), made.storage.read_bytes(other.journal_key(4)))
    (finding,) = found_in(made)
    assert finding.key == made.key(4) and INVALID_LSN < finding.after_lsn < finding.to_lsn
