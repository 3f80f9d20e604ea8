"""Which relation version holds where, what a block takes along of them, and what the book keeps of each."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

import pytest

from tests.pgoutput import writer
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import Relation, RelationColumn, Type
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.stream.pending import PendingMessages
from xidstream.pipeline.stream.relation_book import RelationBook


def stream(xid: int) -> PendingMessages:
    return PendingMessages(Spares(0), Xid(xid), Lsn(1), streamed=True)


A, B, C = stream(700), stream(701), stream(702)
MOOD = 90_000


@pytest.fixture(autouse=True)
def no_stream_has_declared_anything() -> None:
    A.relations = B.relations = C.relations = None


@pytest.fixture
def book() -> RelationBook:
    return RelationBook()


def _xid(scope: PendingMessages | None) -> Xid | None:
    return None if scope is None else scope.xid


def relation(scope: PendingMessages | None, *columns: str, relid: int = 1, table: str = "t") -> Relation:
    made = tuple(RelationColumn(i == 0, name, MOOD, -1) for i, name in enumerate(columns))
    return Relation(_xid(scope), relid, "public", table, "d", made)


def body_of(message: Relation) -> bytes:
    return writer.write(message)[1 if message.xid is None else 5 :]


def declare(
    book: RelationBook, scope: PendingMessages | None, *columns: str, relid: int = 1, table: str = "t"
) -> None:
    message = relation(scope, *columns, relid=relid, table=table)
    book.declare(scope, message, body_of(message))


def columns(book: RelationBook, scope: PendingMessages | None, relid: int = 1) -> list[str]:
    return [c.name for c in book.used(scope, [relid]).relations[relid].columns]


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
    assert not book.used(None, [1]).versions and not book.used(A, [1]).versions
    book.promote(A)
    assert not book.used(None, [1]).versions


def test_a_stream_that_declared_nothing_promotes_nothing(book: RelationBook) -> None:
    declare(book, None, "a")
    book.promote(stream(999))
    assert columns(book, None) == ["a"]


def test_a_plain_declaration_that_repeats_another_is_newer_than_an_open_streams(book: RelationBook) -> None:
    declare(book, None, "a")
    declare(book, A, "a", "b")
    declare(book, None, "a")
    book.promote(A)
    assert columns(book, None) == ["a"]


def test_only_another_content_is_a_change(book: RelationBook) -> None:
    def changes(scope: PendingMessages | None, *names: str) -> bool:
        message = relation(scope, *names)
        return book.changes(scope, message, body_of(message))

    assert not changes(None, "a"), "the first one changes nothing: no row can be of an earlier one"
    declare(book, None, "a")
    assert not changes(None, "a") and changes(None, "b") and changes(None, "a", "b")
    assert not changes(A, "b"), "a stream has its own"
    book.add_type(None, Type(None, MOOD, "public", "mood"))
    assert changes(None, "a"), "the column has another type now"


def test_a_block_takes_along_what_its_rows_use_and_nothing_else(book: RelationBook) -> None:
    for relid in range(1, 10_001):
        declare(book, None, "a", relid=relid, table=f"t{relid}")
    used = book.used(None, [17, 4_000])
    assert set(used.relations) == {17, 4_000} and len(used.versions) == 2
    assert used.relations[17].table == "t17"
    assert not book.used(None, [20_000]).versions, "never declared: the decoder says so"
    assert not book.used(A, [17]).versions, "plain relations do not hold in a stream"


def test_a_later_declaration_does_not_change_what_a_block_took_along(book: RelationBook) -> None:
    declare(book, None, "a")
    before = book.used(None, [1])
    declare(book, None, "b")
    assert [c.name for c in before.relations[1].columns] == ["a"]


def test_a_type_is_of_the_relation_behind_it_and_of_no_later_one(book: RelationBook) -> None:
    """The server names the types of a relation again each time, directly in front of it."""
    book.add_type(None, Type(None, MOOD, "public", "mood"))
    declare(book, None, "a")
    declare(book, None, "a", relid=2)
    assert book.used(None, [1]).relations[1].columns[0].base_type_name == "public.mood"
    assert book.used(None, [2]).relations[2].columns[0].base_type_name is None


def test_a_version_that_was_forgotten_comes_back_equal_with_its_types(book: RelationBook) -> None:
    small = RelationBook(remembered_columns=0)
    for scope in (None, A):
        small.add_type(scope, Type(_xid(scope), MOOD, "schéma", "mood"))
        declare(small, scope, "a", "b", "naïve", relid=5, table="tàble")
        book.add_type(scope, Type(_xid(scope), MOOD, "schéma", "mood"))
        declare(book, scope, "a", "b", "naïve", relid=5, table="tàble")
        assert small.used(scope, [5]).relations == book.used(scope, [5]).relations
    assert book.used(A, [5]).versions.keys() == book.used(None, [5]).versions.keys(), (
        "one number for one content"
    )
    assert small.used(A, [5]).versions.keys() != small.used(A, [5]).versions.keys()


@pytest.mark.parametrize(("schema", "name"), [("public", "public.mood"), ("pg_catalog", "mood")])
def test_a_types_name_is_written_with_its_schema_unless_it_is_the_systems(
    book: RelationBook, schema: str, name: str
) -> None:
    book.add_type(A, Type(_xid(A), MOOD, schema, "mood"))
    declare(book, A, "a")
    declare(book, B, "a")
    assert book.used(A, [1]).relations[1].columns[0].base_type_name == name
    assert book.used(B, [1]).relations[1].columns[0].base_type_name is None


@pytest.mark.parametrize("with_open_stream", [False, True])
def test_a_relation_that_was_made_and_dropped_leaves_some_200_bytes(with_open_stream: bool) -> None:
    """The server says nothing of a DROP TABLE, and would not declare the relation again: it cannot be forgotten."""
    book = RelationBook(remembered_columns=0)
    if with_open_stream:
        declare(book, A, "a", relid=1)
    n = 5_000
    tracemalloc.start()
    for relid in range(100_000, 100_000 + n):
        declare(book, None, "id", "customer", "amount", relid=relid, table=f"table_{relid}")
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept / n < (320 if with_open_stream else 240)


def test_versions_as_objects_are_kept_for_the_blocks_of_late_alone() -> None:
    book = RelationBook(remembered_columns=1_000)
    for relid in range(1, 1_001):
        declare(book, None, "a", "b", relid=relid, table=f"t{relid}")
        assert book.used(None, [1, relid]).relations[relid].table == f"t{relid}"
    assert book._versions.weight <= 1_000


@dataclass
class Naive:
    """The same rules, with everything kept as it came."""

    plain: dict[int, tuple[int, RelationVersion]] = field(default_factory=dict)
    streams: dict[PendingMessages, dict[int, tuple[int, RelationVersion]]] = field(default_factory=dict)

    def of(self, scope: PendingMessages | None) -> dict[int, tuple[int, RelationVersion]]:
        return self.plain if scope is None else self.streams.setdefault(scope, {})

    def promote(self, stream: PendingMessages) -> None:
        for relid, declared in self.streams.pop(stream, {}).items():
            self.plain[relid] = max(declared, self.plain.get(relid, (0, declared[1])), key=lambda d: d[0])


@pytest.mark.parametrize("remembered_columns", [0, 60, 1 << 20])
def test_whatever_the_order_each_scope_has_what_was_declared_last_in_it(remembered_columns: int) -> None:
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    book, naive = RelationBook(remembered_columns), Naive()
    content_of: dict[int, RelationVersion] = {}
    for arrival in range(1, 4_000):
        scope = chosen.choice([None, None, A, B, C])
        relid, names = chosen.randrange(1, 12), [f"c{i}" for i in range(chosen.randrange(1, 4))]
        act = chosen.random()
        if act < 0.5:
            typed = chosen.random() < 0.3
            if typed:
                book.add_type(scope, Type(_xid(scope), MOOD, "public", "mood"))
            message = relation(scope, *names, relid=relid)
            version = book.resolve(message, {MOOD: "public.mood"} if typed else {})
            known = naive.of(scope).get(relid)
            assert book.changes(scope, message, body_of(message)) == (
                known is not None and known[1] != version
            ), f"seed {seed}"
            book.declare(scope, message, body_of(message))
            naive.of(scope)[relid] = arrival, version
        elif act < 0.6 and scope is not None:
            book.promote(scope)
            naive.promote(scope)
        elif act < 0.65 and scope is not None:
            book.drop(scope)
            naive.streams.pop(scope, None)
        relids = chosen.sample(range(1, 14), chosen.randrange(1, 6))
        used = book.used(scope, relids)
        expected = {r: naive.of(scope)[r][1] for r in relids if r in naive.of(scope)}
        assert used.relations == expected, f"seed {seed}"
        for number, version in used.versions.items():
            assert content_of.setdefault(number, version) == version, (
                f"seed {seed}: a number means one version"
            )
