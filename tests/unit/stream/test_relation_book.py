"""Which relation version holds where, and how a block's snapshot is told from another."""

from __future__ import annotations

import pytest

from xidstream.pipeline.pg import Xid
from xidstream.pipeline.protocol.messages import Relation, RelationColumn, Type
from xidstream.pipeline.stream.relation_book import RelationBook

A, B = Xid(700), Xid(701)
MOOD = 90_000


@pytest.fixture
def book() -> RelationBook:
    return RelationBook()


def declare(book: RelationBook, scope: Xid | None, *columns: str, relid: int = 1) -> None:
    made = tuple(RelationColumn(i == 0, name, MOOD, -1) for i, name in enumerate(columns))
    book.declare(scope, book.resolve(scope, Relation(scope, relid, "public", "t", "d", made)))


def columns(book: RelationBook, scope: Xid | None, relid: int = 1) -> list[str]:
    return [c.name for c in book.snapshot(scope).relations[relid].columns]


def test_of_two_streams_that_commit_the_later_declaration_holds_in_whatever_order(book: RelationBook) -> None:
    declare(book, A, "old")
    declare(book, B, "new")
    book.promote(B)
    book.promote(A)
    assert columns(book, None) == ["new"]


def test_a_plain_declaration_after_the_streams_holds_whatever_the_stream_does(book: RelationBook) -> None:
    declare(book, A, "old")
    declare(book, None, "new")
    book.promote(A)
    assert columns(book, None) == ["new"]
    declare(book, B, "newest")
    book.promote(B)
    assert columns(book, None) == ["newest"]


def test_what_a_dropped_stream_declared_holds_nowhere_and_its_xid_begins_anew(book: RelationBook) -> None:
    declare(book, A, "a")
    book.drop(A)
    assert book.current(None, 1) is None and book.current(A, 1) is None
    book.promote(A)
    assert book.snapshot(None).relations == {}


def test_a_stream_that_declared_nothing_promotes_nothing(book: RelationBook) -> None:
    declare(book, None, "a")
    before = book.snapshot(None)
    book.promote(Xid(999))
    assert book.snapshot(None) is before


def test_snapshots_have_one_number_exactly_where_they_have_one_content(book: RelationBook) -> None:
    """Buffers keep relations by that number: another content under it would decode rows by a wrong table."""
    seen = {}

    def look(scope: Xid | None) -> None:
        snapshot = book.snapshot(scope)
        assert book.snapshot(scope) is snapshot
        content = dict(snapshot.relations)
        assert seen.setdefault(snapshot.number, content) == content

    look(None)
    declare(book, None, "a")
    look(None)
    declare(book, None, "a")  # a repetition is no change
    look(None)
    declare(book, None, "a", "b")
    look(None)
    declare(book, A, "c")
    look(A)
    look(None)
    book.promote(A)
    look(None)
    declare(book, None, "d", relid=2)
    look(None)
    assert len(seen) == 5, "a stream's relations that hold for all after its commit have its number"
    assert columns(book, None) == ["c"] and columns(book, None, relid=2) == ["d"]


def test_a_snapshot_does_not_change_with_what_is_declared_later(book: RelationBook) -> None:
    declare(book, None, "a")
    before = book.snapshot(None)
    declare(book, None, "b", relid=2)
    assert set(before.relations) == {1}


@pytest.mark.parametrize(("schema", "name"), [("public", "public.mood"), ("pg_catalog", "mood")])
def test_a_types_name_is_written_with_its_schema_unless_it_is_the_systems(
    book: RelationBook, schema: str, name: str
) -> None:
    book.add_type(A, Type(A, MOOD, schema, "mood"))
    declare(book, A, "a")
    declare(book, B, "a")
    assert book.snapshot(A).relations[1].columns[0].base_type_name == name
    assert book.snapshot(B).relations[1].columns[0].base_type_name is None
