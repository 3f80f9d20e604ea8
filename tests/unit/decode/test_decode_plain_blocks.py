"""Blocks of whole small transactions: their grammar, owners, stamps and the table of transactions."""

from __future__ import annotations

import datetime
import weakref

import pytest

from tests.unit.decode.builder import (
    LSN,
    begin,
    block,
    commit,
    insert,
    logical,
    origin,
    relation,
    truncate,
    update,
)
from xidstream.pipeline.decode import DecodedPlainBlock, decode_plain_block
from xidstream.pipeline.decode.table_decoder import DecodedTable
from xidstream.pipeline.errors import IllegalTransition, MalformedMessage, PoisonedChange, ProtocolViolation
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.poison import NO_SKIPS
from xidstream.pipeline.schema import rows

A = relation(("id", "int4"), relid=5, name="a", keys=["id"])
B = relation(("id", "int4"), relid=3, name="b")
UTC = datetime.timezone.utc


def decode(*messages: bytes) -> DecodedPlainBlock:
    return decode_plain_block(*block(*messages), {5: A, 3: B})


def test_transactions_own_their_rows_and_each_counts_ordinals_from_0() -> None:
    decoded = decode(
        begin(100, 7, 5),
        insert(["1"]),
        insert(["2"], relid=3),
        commit(100, 6),
        begin(200, 8),
        update(["4"], key=["3"]),
        commit(200),
    )
    b, a = decoded.tables
    assert a.batch.to_pydict()["owner"] == [0, 1, 1]
    assert a.batch.to_pydict()["ordinal"] == [0, 0, 1]
    assert b.batch.to_pydict()["ordinal"] == [1]
    assert decoded.n_rows == 4
    assert decoded.stamp.commit_lsn.tolist() == [100, 200]
    assert decoded.stamp.xid.tolist() == [7, 8]
    assert decoded.stamp.commit_timestamp_us.tolist() == [POSTGRES_EPOCH_UNIX_US + 6, POSTGRES_EPOCH_UNIX_US]


def test_transactions_batch_counts_rows_and_sorts_tables() -> None:
    decoded = decode(
        begin(100, 7),
        origin("nœud"),
        insert(["1"]),
        insert(["2"], relid=3),
        insert(["3"]),
        commit(100, 1_000_000),
        begin(200, 8),
        truncate([5, 3]),
        commit(200),
    )
    decoded.transactions.validate(full=True)
    assert decoded.transactions.schema == rows.TRANSACTIONS_SCHEMA
    common = {"gid": None, "streamed": False, "tables": ["public.a", "public.b"]}
    assert decoded.transactions.to_pylist() == [
        {
            **common,
            "xid": 7,
            "commit_lsn": 100,
            "end_lsn": 108,
            "commit_timestamp": datetime.datetime(2000, 1, 1, 0, 0, 1, tzinfo=UTC),
            "origin": "nœud",
            "rows": 3,
        },
        {
            **common,
            "xid": 8,
            "commit_lsn": 200,
            "end_lsn": 208,
            "commit_timestamp": datetime.datetime(2000, 1, 1, tzinfo=UTC),
            "origin": None,
            "rows": 2,
        },
    ]


def test_transactions_without_rows_and_messages_are_left_out_but_stamped() -> None:
    decoded = decode(
        begin(100, 7),
        commit(100),
        begin(200, 8),
        logical("p", b"x"),
        commit(200),
        begin(300, 9),
        insert(["1"]),
        commit(300),
        logical("outside", b"", flags=0),
    )
    assert decoded.transactions.to_pydict()["xid"] == [8, 9]
    assert decoded.transactions.to_pydict()["rows"] == [0, 1]
    assert decoded.transactions.to_pydict()["tables"] == [[], ["public.a"]]
    assert decoded.stamp.xid.tolist() == [7, 8, 9]
    assert decoded.tables[0].batch.to_pydict()["owner"] == [2]


def test_messages_have_their_commit_only_when_transactional() -> None:
    decoded = decode(
        logical("first", b"", lsn=1, flags=0),
        begin(100, 7),
        logical("in", b"1", lsn=2),
        commit(100),
        logical("between", b"2", lsn=3, flags=0),
        begin(200, 8),
        logical("in", b"3", lsn=4),
        commit(200),
    )
    assert decoded.messages is not None
    decoded.messages.validate(full=True)
    assert decoded.messages.schema == rows.MESSAGES_SCHEMA
    got = decoded.messages.to_pydict()
    assert got["commit_lsn"] == [None, 100, None, 200]
    assert got["xid"] == [None, 7, None, 8]
    assert got["transactional"] == [False, True, False, True]
    assert got["lsn"] == [1, 2, 3, 4]
    assert got["content"] == [b"", b"1", b"2", b"3"]


def test_heartbeats_are_left_out_with_their_transactions_and_nothing_else_is() -> None:
    decoded = decode(
        begin(100, 7), logical("xidstream", b""), commit(100),
        begin(200, 8), logical("xidstreaM", b"theirs", lsn=2), insert(["1"]), logical("xidstream", b""), commit(200),
        logical("xidstream2", b"theirs", lsn=3, flags=0),
    )  # fmt: skip
    assert decoded.messages is not None
    assert decoded.messages.to_pydict()["lsn"] == [2, 3]
    assert decoded.transactions.to_pydict()["xid"] == [8]
    assert decoded.stamp.xid.tolist() == [7, 8]
    theirs = decode(
        begin(100, 7),
        logical("xidstream", b"x", lsn=4),
        commit(100),
        logical("xidstream", b"", flags=0, lsn=5),
    ).messages
    assert theirs is not None and sorted(theirs.to_pydict()["lsn"]) == [4, 5], "heartbeats are not like this"
    alone = decode(begin(100, 7), logical("xidstream", b""), commit(100))
    assert (alone.messages, alone.transactions.num_rows, alone.n_rows) == (None, 0, 0)


def test_only_messages_outside_transactions_is_a_block_too() -> None:
    decoded = decode(logical("p", b"", flags=0))
    assert decoded.messages is not None
    assert (len(decoded.stamp.xid), decoded.transactions.num_rows, decoded.n_rows) == (0, 0, 0)


def test_empty_block_gives_nothing() -> None:
    decoded = decode()
    assert (decoded.tables, decoded.messages, decoded.n_rows, decoded.transactions.num_rows) == (
        (),
        None,
        0,
        0,
    )


def test_table_recreated_under_another_relid_is_named_once() -> None:
    again = relation(("id", "int4"), relid=6, name="a")
    decoded = decode_plain_block(
        *block(begin(1, 7), insert(["1"]), insert(["2"], relid=6), commit(1)), {5: A, 6: again}
    )
    assert decoded.transactions.to_pydict()["tables"] == [["public.a"]]


def test_release_of_a_plain_block_stamps_each_row_with_its_own_transaction() -> None:
    decoded = decode(begin(100, 7), insert(["1"]), commit(100), begin(200, 8), insert(["2"]), commit(200))
    released = rows.release(decoded.tables[0].batch, A, decoded.stamp, plain=True)
    assert released.to_pydict()["_commit_lsn"] == [100, 200]
    assert released.to_pydict()["_xid"] == [7, 8]


@pytest.mark.parametrize(
    ("messages", "story"),
    [
        ([insert(["1"])], "'I' at LSN .* outside a transaction"),
        ([truncate([5])], "'T' at LSN .* outside"),
        ([commit(1)], "'C' at LSN .* outside"),
        ([origin("o")], "'O' at LSN .* outside"),
        ([logical("p", b"")], "'M' at LSN .* outside"),
        ([begin(1, 7), begin(2, 8)], "'B' at LSN .* inside"),
        ([begin(1, 7), logical("p", b"", flags=0)], "'M' at LSN .* inside"),
        ([begin(1, 7), insert(["1"]), origin("o")], "'O' at LSN .* directly follow"),
        ([begin(1, 7), origin("o"), origin("o")], "'O' at LSN .* directly follow"),
        ([begin(1, 7), commit(2)], "'C' at LSN .* another commit LSN"),
        ([begin(1, 7), insert(["1"])], "ends inside a transaction"),
        ([begin(1, 7)], "ends inside a transaction"),
        ([b"R" + b"\0" * 20], "'R' at LSN .* no place"),
        ([b"\xff" + b"\0" * 20], "0xff at LSN .* no place"),
    ],
)
def test_grammar_of_a_plain_block(messages: list[bytes], story: str) -> None:
    with pytest.raises(IllegalTransition, match=story):
        decode(*messages)


def test_commit_and_begin_have_no_place_in_a_transaction_block() -> None:
    from xidstream.pipeline.decode import decode_transaction_block

    for message in (begin(1, 7), commit(1), origin("o")):
        with pytest.raises(IllegalTransition, match="no place"):
            decode_transaction_block(*block(message), {}, streamed=False, xid=7, first_ordinal=0)


def test_unknown_commit_flags_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="unknown flags 0x01"):
        decode(begin(1, 7), commit(1, flags=1))


def test_error_names_the_lsn_of_the_failing_message() -> None:
    lsn = LSN + 2
    with pytest.raises(ProtocolViolation, match=f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X} is about relation 99"):
        decode(begin(1, 7), insert(["1"]), insert(["1"], relid=99), commit(1))


def test_poison_in_a_plain_block_names_its_own_transactions_xid() -> None:
    decoded = decode(begin(1, 7), insert(["1"]), commit(1), begin(2, 8), insert(["x"]), commit(2))
    assert decoded.undeliverable is not None
    error = decoded.undeliverable.error
    assert isinstance(error, PoisonedChange)
    assert "xid 8, LSN 1/AB4: public.a column id" in error.message and "commit LSN 0/2" in error.message
    assert "xidstream slot skip --xid 8 --commit-lsn 0/2" in error.remedy


def test_an_origin_that_is_not_utf8_has_its_bytes_written_out() -> None:
    bad = origin("o").replace(b"o\0", b"\xff\0")
    decoded = decode(
        begin(1, 7), bad, insert(["1"]), commit(1), begin(2, 8), origin("é"), insert(["2"]), commit(2)
    )
    assert decoded.transactions.column("origin").to_pylist() == ["\\xff", "é"]


def test_each_table_is_given_away_before_the_next_is_decoded() -> None:
    """A block of 5,000 tables of one row took 100 MB, because all stood decoded at once: 10 KB each, and as much again
    when they were released."""
    relations = {n: relation(("id", "int4"), ("note", "text"), relid=n, name=f"t{n}") for n in range(1, 501)}
    messages = [m for n in relations for m in (begin(n, n), insert([str(n), "x"], relid=n), commit(n))]
    alive = most = 0
    taken = []

    def ended() -> None:
        nonlocal alive
        alive -= 1

    def take(table: DecodedTable, stamp: rows.Stamp) -> None:
        nonlocal alive, most
        alive += 1
        weakref.finalize(table, ended)
        most = max(most, alive)
        (owner,) = table.batch.column(1).to_pylist()
        taken.append(
            (table.relation.relid, table.batch.column(rows.N_INTERNAL).to_pylist(), stamp.xid[owner])
        )

    decoded = decode_plain_block(*block(*messages), relations, take=take)
    assert most <= 2
    assert taken == [(n, [n], n) for n in relations]
    assert (decoded.tables, decoded.is_whole, decoded.n_rows) == ((), True, 500)
    assert decoded.transactions.num_rows == 500


@pytest.mark.parametrize("given_up", [False, True], ids=["poison", "given up"])
def test_of_a_block_that_is_not_whole_the_result_has_the_tables(given_up: bool) -> None:
    relations = {n: relation(("note", "text"), relid=n, name=f"t{n}") for n in (1, 2, 3)}
    bad: list[bytes | str] = ["good", "good" if given_up else b"caf\xe9", "good"]
    messages = [m for n in relations for m in (begin(n, n), insert([bad[n - 1]], relid=n), commit(n))]
    pairs = frozenset({(Xid(2), Lsn(2))}) if given_up else NO_SKIPS
    decoded = decode_plain_block(*block(*messages), relations, pairs, take=lambda table, stamp: None)
    assert not decoded.is_whole
    kept = [1, 3] if given_up else [1]
    assert [table.relation.relid for table in decoded.tables] == kept
    assert decoded.transactions.column("xid").to_pylist() == kept
