"""A file that takes in others has their transactions, rows and messages, in fewer units, and nothing twice."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest

from tests.unit.storage.test_journal_file import (
    Store,
    Written,
    message_rows,
    rows_of,
    table,
    transaction_rows,
    unit,
)
from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import (
    InlineMessages,
    MemoryMessages,
    MemoryPart,
    Sealed,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.packs import FEW_TABLES, PartsBuilder
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column
from xidstream.pipeline.storage.journal_file import (
    JournalRows,
    load_journal_units,
    stored_journal_units,
    verify_journal_file,
    write_journal_file,
)
from xidstream.pipeline.storage.journal_joining import JoinedRows, joined

Unit = tuple[UnitEnd, Sealed]


def small(store: Store, i: int, *tables: int, n: int = 2, messages: int = 0, skipped: int = 0) -> Unit:
    """One transaction with ``n`` rows of each table; without tables and rows it left nothing."""
    lsn = 0x1000 * (i + 1)
    memory = tuple(
        MemoryPart(table(t), n, 100 * n, lsn, store.put(rows_of(table(t), n, lsn))) for t in tables
    )
    made = unit(
        transaction_rows(lsn),
        n * len(tables),
        memory=memory,
        messages=tuple(InlineMessages(message_rows(1, lsn + j)) for j in range(messages)),
    )
    skips = tuple(SkippedTransaction(Xid(9), Lsn(lsn + 1), tables or None) for _ in range(skipped))
    end = UnitEnd(Lsn(lsn), Lsn(lsn), Lsn(lsn + 0x30), 1)
    return end, dataclasses.replace(made, skipped=skips)


def fetch_from(store: Store):
    def fetch(ref: object):
        if isinstance(ref, JoinedRows):
            return ref.table(fetch)
        return ref.table() if isinstance(ref, JournalRows) else store.fetch(ref)

    return fetch


def content_of(units: Sequence[Unit], fetch) -> dict[str, object]:
    """All that a sink could get, in its order."""
    contents = [content for _, content in units]
    rows: dict[object, list[object]] = {}
    for content in contents:
        for part in content.memory:
            found = fetch(part.ref)
            assert part.pack_index is not None or found.num_rows == part.n_rows
            rows.setdefault(
                part.relation if part.pack_index is None else (part.relation, part.pack_index), []
            ).extend(found.to_pylist())
    messages: list[object] = []
    for part in (part for content in contents for part in content.messages):
        if isinstance(part, SpilledMessages):
            messages.append(part)
        else:
            of_part = part.rows if isinstance(part, InlineMessages) else fetch(part.ref)
            messages += of_part.to_pylist()
    return {
        "transactions": [row for content in contents for row in content.transactions.to_pylist()],
        "rows": rows,
        "messages": messages,
        "segments": [part for content in contents for part in content.segments],
        "left out": [pair for content in contents for pair in content.skipped],
        "n_rows": sum(content.n_rows for content in contents),
        "n_bytes": sum(content.n_bytes for content in contents),
        "n_transactions": sum(end.n_transactions for end, _ in units),
        "end": max(end.end_lsn for end, _ in units),
    }


def test_small_units_of_the_same_tables_become_one(local, layout) -> None:
    store = Store()
    units = [small(store, i, 1, 2, messages=i % 2) for i in range(30)]
    (made,) = joined(units, 1000)
    assert made[0] == UnitEnd(
        units[0][0].first_commit_lsn, units[-1][0].last_commit_lsn, units[-1][0].end_lsn, 30
    )
    assert [part.relation for part in made[1].memory] == [table(1), table(2)]
    assert content_of([made], fetch_from(store)) == content_of(units, store.fetch)
    apart = write_journal_file(local, layout, 0, [u for _, u in units], [e for e, _ in units], store.fetch)
    together = write_journal_file(local, layout, 1, [made[1]], [made[0]], fetch_from(store))
    assert together.n_transactions == apart.n_transactions
    assert together.file_bytes < apart.file_bytes / 4


@pytest.mark.parametrize("seed", range(40))
def test_files_that_are_absorbed_one_after_the_other_have_it_all(local, layout, relation, seed: int) -> None:
    """Several times over, with every kind of part in between, and what comes out is as it went in."""
    print(f"seed {seed}")
    rng, store, number = random.Random(seed), Store(), itertools.count(100)
    went_in: list[Unit] = []
    journal = []
    most_rows = rng.choice([1, 7, 1000])
    written = Written(local, layout, relation)
    special = list(zip(written.ends, written.units, strict=True))
    for i in range(rng.randint(2, 12)):
        fetch = fetch_from(store)
        if i == 1 and rng.random() < 0.5:
            # As the server sends them: before all others.
            new = special
            fetch = fetch_from(written.store)
        else:
            new = [
                small(
                    store,
                    16 + 20 * i + k,
                    *rng.sample(range(1, 20), rng.choice([0, 1, 1, 2, 3])),
                    n=rng.randint(1, 3),
                    messages=rng.choice([0, 0, 1]),
                    skipped=rng.choice([0, 0, 0, 1]),
                )
                for k in range(rng.randint(1, 5))
            ]
        went_in += new
        absorbed = journal[len(journal) - rng.randint(0, len(journal)) :]
        units = [*(u for file in absorbed for u in stored_journal_units(local, layout, file)), *new]
        if absorbed:
            units = joined(units, most_rows)
        ends, contents = [end for end, _ in units], [content for _, content in units]
        file = write_journal_file(local, layout, next(number), contents, ends, fetch)
        journal = [*journal[: len(journal) - len(absorbed)], file]
    loaded_into = Store()
    came_out = []
    for file in journal:
        assert verify_journal_file(local, layout, layout.epoch, file.number) == file
        came_out += load_journal_units(local, layout, file, loaded_into.put)
    before = {**store, **written.store}
    expected = content_of(went_in, lambda ref: before[ref])
    assert content_of(came_out, loaded_into.fetch) == expected
    commits = [end.first_commit_lsn for end, _ in came_out if end.first_commit_lsn]
    assert commits == sorted(commits) or special[0] in went_in


def test_what_cannot_be_joined_stays_as_it_is_and_in_its_place(local, layout, relation) -> None:
    """Segments, packs, another version of a table, and whatever would make a unit too large."""
    written, store = Written(local, layout, relation), Store()
    first, *_, last = (small(store, i, 1) for i in range(6))
    of_many = PartsBuilder(store.put, FEW_TABLES + 1)
    for t in range(FEW_TABLES + 1):
        of_many.add(table(t + 1), rows_of(table(t + 1), 1, 0x2000))
    packed = (
        UnitEnd(Lsn(0x2000), Lsn(0x2000), Lsn(0x2030), 1),
        unit(transaction_rows(0x2000), 17, memory=of_many.finish()),
    )
    large = next(u for u in zip(written.ends, written.units, strict=True) if u[1].segments)
    for each in (packed, large):
        assert joined([first, each, last], 1000) == [first, each, last]
    assert joined([first, last], 3) == [first, last], "of four rows"
    two_versions = dataclasses.replace(
        last[1],
        memory=tuple(
            dataclasses.replace(
                part, relation=dataclasses.replace(table(1), columns=(Column("b", 23, -1, True),))
            )
            for part in last[1].memory
        ),
    )
    assert joined([first, (last[0], two_versions)], 1000) == [first, (last[0], two_versions)]
    wide = dataclasses.replace(last[1], n_bytes=1 << 20)
    assert joined([first, (last[0], wide), first], 1000) == [first, (last[0], wide), first]


def test_messages_outside_of_transactions_are_joined_and_have_no_commit(local, layout) -> None:
    store = Store()
    alone = (
        UnitEnd(Lsn(0), Lsn(0), Lsn(0), 0),
        unit(transaction_rows(), messages=(InlineMessages(message_rows(2)),)),
    )
    kept = (
        UnitEnd(Lsn(0), Lsn(0), Lsn(0), 0),
        unit(transaction_rows(), messages=(MemoryMessages(10, store.put(rows_of_messages())),)),
    )
    (made,) = joined([alone, kept, small(store, 0, 1), alone], 1000)
    assert (made[0].first_commit_lsn, made[0].end_lsn) == (0x1000, 0x1030)
    assert len(made[1].messages) == 3
    (none,) = joined([alone, kept], 1000)
    assert none[0] == UnitEnd(Lsn(0), Lsn(0), Lsn(0), 0)
    file = write_journal_file(local, layout, 0, [none[1]], [none[0]], fetch_from(store))
    assert file.first_commit_lsn == 0


def rows_of_messages():
    import pyarrow as pa

    return pa.Table.from_batches([message_rows(3)])


def test_a_file_that_is_not_the_one_that_was_written_is_not_absorbed(local, layout) -> None:
    store = Store()
    (end, content) = small(store, 0, 1)
    file = write_journal_file(local, layout, 0, [content], [end], store.fetch)
    with pytest.raises(SegmentCorrupt, match="another than the one"):
        stored_journal_units(local, layout, dataclasses.replace(file, n_rows=3))
    local.delete([layout.journal_key(0)])
    with pytest.raises(SegmentCorrupt, match="missing"):
        stored_journal_units(local, layout, file)
