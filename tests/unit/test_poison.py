"""What cannot be delivered is judged by what a transaction kept."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from tests.unit.decode.builder import begin, block, commit, insert, logical, relation, truncate, update
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block
from xidstream.pipeline.errors import ColumnNameClash, PoisonedChange
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import Poison, first_poison, kept_notes
from xidstream.pipeline.transactions.transaction import OpenTransaction

BAD = b"caf\xe9"
NOTE = relation(("note", "text"))
CLASH = relation(("note", "text"), ("_SEQ", "int4"), relid=6, name="clash")
END = TransactionEnd(Xid(700), Lsn(100), Lsn(104), 0, streamed=True)


def opened(*messages: bytes) -> OpenTransaction:
    transaction = OpenTransaction(Xid(700), Lsn(1), streamed=True)
    decoded = decode_transaction_block(
        *block(*messages), {5: NOTE, 6: CLASH}, streamed=True, xid=700, first_ordinal=0
    )
    for table in decoded.tables:
        transaction.add_rows(table.relation, table.batch)
    runs = (decoded.run_subxid, decoded.run_first)
    transaction.add(decoded.messages, runs, decoded.n_rows)
    transaction.note(decoded.notes)
    return transaction


def test_a_bad_value_of_a_rolled_back_subtransaction_is_nobodys_loss() -> None:
    transaction = opened(
        insert(["a"], subxid=700),
        insert(["c"], subxid=700),
        insert([BAD], subxid=701),
        insert(["b"], subxid=701),
    )
    assert transaction.poison() is not None
    transaction.roll_back([701])
    assert transaction.poison() is None
    stored = []
    sealed = transaction.seal(END, stored.append)
    assert sealed.undeliverable is None and sealed.n_rows == 2
    assert stored[0].column("note").to_pylist() == ["a", "c"]
    assert stored[0].column("_seq").to_pylist() == [0, 1]


def test_the_first_bad_row_that_is_kept_is_named() -> None:
    transaction = opened(
        insert([b"good"], subxid=700),
        insert([BAD], subxid=702),
        insert([BAD], subxid=700),
        insert([BAD], subxid=702),
        insert([BAD], subxid=701),
    )
    transaction.roll_back([701])
    sealed = transaction.seal(END, lambda table: None)
    assert sealed.undeliverable is not None and not sealed.memory
    error = sealed.undeliverable.error
    assert isinstance(error, PoisonedChange)
    assert error.message.startswith(
        "xid 700, LSN 1/AB1: public.t column note has a value that is not valid UTF-8"
    )
    assert "--xid 700 --commit-lsn 0/64" in error.remedy
    assert pickle.loads(pickle.dumps(error)).remedy == error.remedy


@pytest.mark.parametrize("row", [insert(["a", "1"], subxid=701, relid=6), truncate([6], subxid=701)])
def test_rows_of_a_table_with_a_clashing_column_matter_only_where_they_are_kept(row: bytes) -> None:
    transaction = opened(insert(["a"], subxid=700), row)
    (bad,) = transaction.bad_tables()
    assert bad.table == "public.clash" and "_SEQ" in bad.what
    transaction.roll_back([701])
    assert transaction.bad_tables() == ()
    assert transaction.seal(END, lambda table: None).n_rows == 1


def test_a_preimage_that_fills_an_unchanged_value_is_bad_in_both_rows() -> None:
    from tests.unit.decode.builder import U

    full = relation(("id", "int4"), ("note", "text"))
    decoded = decode_transaction_block(
        *block(update(["2", U], old=["1", BAD], subxid=700)),
        {5: full},
        streamed=True,
        xid=700,
        first_ordinal=0,
    )
    assert decoded.tables[0].batch.column(6).to_pylist() == [None, None]
    assert decoded.tables[0].batch.column(5).to_pylist() == [1, 2]
    assert first_poison(decoded.notes) is not None


@pytest.mark.parametrize(
    "type_",
    ["int4", "float8", "date", "numeric", "text", "text[]", pytest.param("int4[]", marks=pytest.mark.slow)],
)
def test_a_block_of_nothing_but_bad_values_is_decoded_in_linear_time(type_: str) -> None:
    """Each with a subtransaction of its own: 100,000 of them, in a time that a retry for each row cannot reach."""
    n = 100_000
    bad = b"{\xe9}" if type_ == "text[]" else b"{x}" if type_ == "int4[]" else b"\xe9"
    table = relation(("c", type_, (10 << 16 | 2) + 4 if type_ == "numeric" else -1))
    content = block(*[insert([bad], subxid=i) for i in range(1, n + 1)])
    started = time.process_time()
    decoded = decode_transaction_block(*content, {5: table}, streamed=True, xid=700, first_ordinal=0)
    spent_s = time.process_time() - started
    print(f"{type_}: {spent_s:.2f} s of CPU")
    (note,) = decoded.notes
    assert len(note.owner) == n and note.owner.nbytes + note.lsn.nbytes == 12 * n
    owners = np.arange(1, n + 1, dtype=np.uint32)
    assert first_poison(kept_notes(decoded.notes, owners[:-1])) == Poison(Lsn(int(note.lsn[-1])), note.what)
    assert kept_notes(decoded.notes, owners) == []


def test_bad_values_of_one_subtransaction_are_noted_once() -> None:
    content = block(*[insert([BAD], subxid=701) for _ in range(10_000)])
    decoded = decode_transaction_block(*content, {5: NOTE}, streamed=True, xid=700, first_ordinal=0)
    (note,) = decoded.notes
    assert note.owner.tolist() == [701]


def test_a_plain_block_ends_before_its_first_poison() -> None:
    decoded = decode_plain_block(
        *block(
            begin(100, 7), insert(["a"]), commit(100),
            logical("between", b"", lsn=3, flags=0),
            begin(200, 8), insert([BAD]), insert(["x"]), logical("in", b"", lsn=4), commit(200),
            begin(300, 9), insert(["c"]), commit(300),
        ),
        {5: NOTE},
    )  # fmt: skip
    assert decoded.undeliverable is not None
    assert "xid 8, " in decoded.undeliverable.error.message
    assert (decoded.undeliverable.last_commit_lsn, decoded.undeliverable.end_lsn) == (100, 108)
    assert decoded.undeliverable.n_transactions == 1
    assert decoded.transactions.column("xid").to_pylist() == [7]
    assert decoded.tables[0].batch.column(5).to_pylist() == ["a"] and decoded.n_rows == 1
    assert decoded.messages is not None and decoded.messages.column("prefix").to_pylist() == ["between"]


def test_a_plain_block_goes_on_behind_what_was_given_up() -> None:
    messages = [
        begin(100, 7), insert(["a"]), commit(100),
        begin(200, 8), insert([BAD]), logical("in", b"", lsn=4), commit(200),
        begin(300, 9), insert(["c"]), commit(300),
        begin(400, 10), insert([BAD]), commit(400),
    ]  # fmt: skip
    wrong = decode_plain_block(
        *block(*messages), {5: NOTE}, frozenset({(Xid(7), Lsn(200)), (Xid(8), Lsn(100))})
    )
    assert wrong.undeliverable is not None and "xid 8, " in wrong.undeliverable.error.message
    assert wrong.skipped == ()
    decoded = decode_plain_block(*block(*messages), {5: NOTE}, frozenset({(Xid(8), Lsn(200))}))
    assert decoded.skipped == ((8, 200, (5,)),)
    assert decoded.transactions.column("xid").to_pylist() == [7, 9]
    assert decoded.tables[0].batch.column(5).to_pylist() == ["a", "c"]
    assert decoded.messages is None
    assert decoded.undeliverable is not None and "xid 10, " in decoded.undeliverable.error.message
    assert decoded.undeliverable.n_transactions == 3


def test_where_tables_are_parked_a_plain_block_goes_on_without_the_bad_ones_from_there_on() -> None:
    messages = [
        begin(100, 7), insert(["a"]), insert(["1"], relid=8), commit(100),
        begin(200, 8), insert(["b"]), insert([BAD]), insert(["2"], relid=8), logical("in", b"", lsn=4), commit(200),
        begin(300, 9), insert(["c"]), insert(["x", "1"], relid=6), insert(["x", "1"], relid=6), commit(300),
        begin(400, 10), insert([BAD]), commit(400),
        begin(500, 11), insert(["3"], relid=8), truncate([5, 8]), commit(500),
    ]  # fmt: skip
    tables = {5: NOTE, 6: CLASH, 8: relation(("id", "int4"), relid=8, name="good")}
    decoded = decode_plain_block(*block(*messages), tables, parks=True)
    assert decoded.undeliverable is None and not decoded.is_whole
    kept = {table.relation.relid: table.batch for table in decoded.tables}
    assert kept[5].column(5).to_pylist() == ["a"]
    assert kept[8].column(5).to_pylist() == [1, 2, 3, None] and set(kept) == {5, 8}
    told = {each.relid: each for each in decoded.bad_tables}
    assert {relid: (each.table, each.xid, each.commit_lsn) for relid, each in told.items()} == {
        5: ("public.t", 8, 200),
        6: ("public.clash", 9, 300),
    }
    assert (told[5].n_changes, told[6].n_changes) == (5, 2)
    assert "UTF-8" in told[5].what and "_SEQ" in told[6].what
    assert decoded.transactions.column("rows").to_pylist() == [2, 3, 3, 1, 3]
    assert decoded.transactions.column("tables")[1].as_py() == ["public.good", "public.t"]
    assert decoded.messages is not None and decoded.messages.num_rows == 1, "messages are of no table"
    taken: list[object] = []
    again = decode_plain_block(*block(*messages), tables, take=lambda *each: taken.append(each), parks=True)
    assert again.bad_tables == decoded.bad_tables and len(again.tables) == 2
    skips = frozenset({(Xid(8), Lsn(200)), (Xid(9), Lsn(300))})
    (only,) = decode_plain_block(*block(*messages), tables, skips, parks=True).bad_tables
    assert (only.relid, only.commit_lsn, only.n_changes) == (5, 400, 2), "what was given up parks nothing"


def test_a_table_with_clashing_names_is_parked_also_where_a_bad_value_ends_the_run() -> None:
    clash = insert(["x", "1"], relid=6)
    messages = [
        begin(100, 7), insert(["a"]), clash, commit(100),
        begin(200, 8), clash, insert([BAD]), commit(200),
        begin(300, 9), clash, clash, commit(300),
    ]  # fmt: skip
    ended = decode_plain_block(*block(*messages), {5: NOTE, 6: CLASH})
    assert ended.undeliverable is not None and "xid 8, " in ended.undeliverable.error.message
    (bad,) = ended.bad_tables
    assert (bad.relid, bad.commit_lsn, bad.n_changes) == (6, 100, 1), "what comes again is counted then"
    gone_on = decode_plain_block(*block(*messages[:4], *messages[-4:]), {5: NOTE, 6: CLASH})
    assert gone_on.undeliverable is None and [table.relation.relid for table in gone_on.tables] == [5]
    assert [bad.n_changes for bad in gone_on.bad_tables] == [3]
    transaction = opened(insert(["a"], subxid=700), insert(["x", "1"], subxid=700, relid=6))
    assert transaction.poison() is None and [each.relid for each in transaction.bad_tables()] == [6]


def test_where_tables_are_parked_a_transaction_keeps_the_others_and_tells_what_it_left_out() -> None:
    transaction = opened(
        insert(["a"], subxid=700),
        insert(["x", "1"], subxid=700, relid=6),
        insert([BAD], subxid=701),
        insert(["x", "2"], subxid=701, relid=6),
    )
    assert {each.relid: each.n_changes for each in transaction.bad_tables()} == {5: 2, 6: 2}
    transaction.roll_back([701])
    assert {each.relid: each.n_changes for each in transaction.bad_tables()} == {6: 1}
    sealed = transaction.seal(END, lambda table: table, parks=True)
    assert sealed.undeliverable is None and sealed.n_rows == 1
    assert sealed.memory[0].ref.column("note").to_pylist() == ["a"]
    (bad,) = sealed.bad_tables
    assert (bad.table, bad.xid, bad.commit_lsn, bad.n_changes) == ("public.clash", 700, 100, 1)
    assert sealed.transactions.column("rows").to_pylist() == [2]
    assert sealed.transactions.column("tables").to_pylist() == [["public.clash", "public.t"]]


def test_poison_survives_its_json() -> None:
    for error in (PoisonedChange, ColumnNameClash):
        poison = Poison(Lsn(77), "public.t column 'é' …", error)
        assert Poison.from_json(poison.to_json()) == poison


def test_utf8_is_judged_as_arrow_judges_it() -> None:
    """Each sequence of up to three bytes at the borders of the ranges, alone in its row."""
    import itertools

    import pyarrow as pa

    from xidstream.pipeline.decode.columns import _not_utf8

    borders = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE,
               0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]  # fmt: skip
    values = [bytes(v) for k in (1, 2, 3) for v in itertools.product(borders, repeat=k)]
    values += [
        bytes([a, b, 0x80, c]) for a in (0xEF, 0xF0, 0xF1, 0xF4, 0xF5) for b in borders for c in borders
    ]
    lengths = np.array([len(v) for v in values], np.int32)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    payload = np.frombuffer(b"".join(values), np.uint8)
    found = np.empty(len(values), np.int64)
    n_found = _not_utf8(payload, starts, lengths, found)

    def decodes(value: bytes) -> bool:
        try:
            pa.array([value], pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return False
        return True

    assert found[:n_found].tolist() == [i for i, v in enumerate(values) if not decodes(v)]
