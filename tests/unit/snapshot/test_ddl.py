"""What DDL messages end, and up to where a generation stands by them: the rules, without a server."""

from __future__ import annotations

import json

import pytest

from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.snapshot import ddl as module
from xidstream.pipeline.snapshot.ddl import AlteredTable, Ddl, KnownDdl, Marks, Witnessed, read_ddl

MARK = 77
ON = Witnessed(MARK, Lsn(100))


def told(lsn: int, mark: int | None = MARK) -> Ddl:
    return Ddl(Lsn(lsn), "ALTER TABLE", (), mark)


def known(*ddl: Ddl, begins_at: int = 0) -> KnownDdl:
    made = KnownDdl(Lsn(begins_at))
    made.add(ddl)
    return made


def test_a_look_proves_that_the_triggers_were_on_since_an_earlier_one_only() -> None:
    marks = Marks()
    assert marks.note(None, Lsn(10)) is None
    assert marks.note(MARK, Lsn(20)) is None, "they may have been installed behind this look's position"
    assert marks.note(MARK, Lsn(30)) == Witnessed(MARK, Lsn(30))
    assert marks.note(MARK, Lsn(40)) == Witnessed(MARK, Lsn(30))
    assert marks.note(MARK + 1, Lsn(50)) is None, "off and on again"
    assert marks.note(MARK + 1, Lsn(60)) == Witnessed(MARK + 1, Lsn(60))
    assert marks.note(None, Lsn(70)) is None
    assert marks.note(MARK + 1, Lsn(80)) is None


def test_a_generation_stands_up_to_the_first_ddl_behind_what_is_proven() -> None:
    assert known(told(110), told(150), told(170)).stands_until(120, ON) == 149


@pytest.mark.parametrize(
    ("ddl", "witnessed"),
    [
        (known(told(150)), None),
        (known(told(150)), Witnessed(MARK, Lsn(130))),
        (known(told(150, mark=1), told(160)), ON),
        (known(told(150, mark=None)), ON),
        (known(told(110)), ON),
        (known(begins_at=0), ON),
        (known(told(150), begins_at=130), ON),
    ],
    ids=[
        "nobody knows of triggers",
        "they were off when it was proven",
        "other triggers",
        "no mark",
        "no message behind it",
        "no message",
        "messages before this hold on the sink are not known",
    ],
)
def test_it_stands_up_to_what_is_proven_where_ddl_may_be_unknown(
    ddl: KnownDdl, witnessed: Witnessed | None
) -> None:
    assert ddl.stands_until(120, witnessed) == 120


@pytest.mark.parametrize(
    ("xid", "snapshot", "lsn"),
    [
        (700, "690:710:", 200),
        (700, "690:710:695,700,702", 149),
        (710, "690:710:", 149),
        (3, f"{(1 << 32) - 5}:{(1 << 32) + 10}:", 200),
        (3, f"{(1 << 32) - 5}:{(1 << 32) + 10}:{(1 << 32) + 3}", 149),
        ((1 << 32) - 1, f"{(1 << 32) - 5}:{(1 << 32) + 10}:", 200),
        (3, f"{(1 << 32) - 5}:{(1 << 32) - 2}:", 149),
        (700, None, 200),
    ],
)
def test_nothing_is_proven_beyond_ddl_that_the_look_did_not_see_yet(
    xid: int, snapshot: str | None, lsn: int
) -> None:
    ddl = known(told(120), Ddl(Lsn(150), "ALTER PUBLICATION", (), MARK, Xid(xid)))
    assert ddl.proves(Lsn(200), snapshot) == lsn
    assert ddl.proves(Lsn(140), snapshot) == 140


def test_a_batch_that_comes_again_brings_no_ddl_twice_and_what_is_forgotten_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    ddl = KnownDdl(Lsn(0))
    assert ddl.add([told(110), told(110)]) == [told(110), told(110)]
    assert ddl.add([told(110), told(150)]) == [told(150)]
    assert ddl.stands_until(105, ON) == 105, "the messages of 110 are not all there any more"
    assert ddl.stands_until(120, ON) == 149


def test_what_the_triggers_did_not_write_is_left_aside() -> None:
    value = {"version": 1, "tag": "ALTER TABLE", "mark": None, "tables": [{"relid": 5}]}
    assert read_ddl(9, json.dumps(value).encode(), 7) == Ddl(
        Lsn(9), "ALTER TABLE", (AlteredTable(5),), None, Xid(7)
    )
    for content in (
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"[" * 100_000,
        json.dumps({**value, "version": 2}).encode(),
        json.dumps({**value, "tables": [5]}).encode(),
        json.dumps({**value, "tables": [{"relid": "x"}]}).encode(),
        json.dumps({**value, "tables": [{"relid": 5, "table": "t"}]}).encode(),
        json.dumps({**value, "mark": []}).encode(),
        json.dumps({**value, "tables": [{"relid": 1e999}]}).encode(),
    ):
        assert read_ddl(9, content) is None, content


def test_the_place_of_a_tables_ddl_is_known_where_every_ddl_left_a_message() -> None:
    def altered(lsn: int, relid: int, mark: int | None = MARK) -> Ddl:
        return Ddl(Lsn(lsn), "ALTER TABLE", (AlteredTable(relid),), mark)

    ddl = known(altered(100, 1), altered(200, 2), altered(300, 1), altered(400, 1))
    witnessed = Witnessed(MARK, Lsn(50))
    assert ddl.altered(1, 150, 350, witnessed) == (Lsn(300), Lsn(300))
    assert ddl.altered(1, 50, 400, witnessed) == (Lsn(100), Lsn(400))
    assert ddl.altered(2, 250, 400, witnessed) is None, "it has left none"
    assert ddl.altered(1, 150, 350, None) is None
    assert ddl.altered(1, 150, 350, Witnessed(MARK, Lsn(160))) is None, "on since later"
    assert known(altered(200, 2, None), altered(300, 1)).altered(1, 150, 350, witnessed) is None, (
        "other triggers"
    )
    assert known(altered(300, 1), begins_at=160).altered(1, 150, 350, witnessed) is None
