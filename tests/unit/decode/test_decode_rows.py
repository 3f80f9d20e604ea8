"""Which rows a message makes, and what they hold: replica identities, unchanged TOAST, ordinals, runs."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.decode.builder import (
    B,
    U,
    block,
    delete,
    insert,
    logical,
    relation,
    truncate,
    tuple_data,
    update,
)
from xidstream.pipeline.decode import DecodedBlock, decode_transaction_block, warm_up
from xidstream.pipeline.errors import IllegalTransition, Unsupported
from xidstream.pipeline.schema import RelationVersion, rows

KEYED = relation(("id", "int4"), ("doc", "text"), ("note", "text"), keys=["id"])


def decode(
    *messages: bytes,
    relations: tuple[RelationVersion, ...] = (KEYED,),
    streamed: bool = False,
    first: int = 0,
    aborted: tuple[int, ...] = (),
) -> DecodedBlock:
    known = {each.relid: each for each in relations}
    return decode_transaction_block(
        *block(*messages), known, streamed=streamed, xid=700, first_ordinal=first, aborted=aborted
    )


def only_table(decoded: DecodedBlock) -> list[dict[str, Any]]:
    (table,) = decoded.tables
    table.batch.validate(full=True)
    assert table.batch.schema == rows.internal_schema(table.relation)
    return table.batch.to_pylist()  # type: ignore[no-any-return]


def column(decoded: DecodedBlock, name: str) -> list[Any]:
    return [row[name] for row in only_table(decoded)]


def changes(decoded: DecodedBlock) -> list[str]:
    return [rows.CHANGE_TYPES[i] for i in column(decoded, "change_type")]


def test_insert_gives_one_row_in_internal_layout() -> None:
    decoded = decode(insert(["1", "d", None]), first=40)
    assert only_table(decoded) == [
        {
            "change_type": rows.INSERT,
            "owner": 0,
            "ordinal": 40,
            "unchanged": None,
            "text": None,
            "id": 1,
            "doc": "d",
            "note": None,
        }
    ]
    assert decoded.n_rows == 1
    assert decoded.messages is None


def test_update_without_old_tuple_has_no_preimage() -> None:
    decoded = decode(update(["1", "d", "n"]))
    assert changes(decoded) == ["update_postimage"]


def test_update_with_full_old_tuple_gives_preimage_then_postimage() -> None:
    decoded = decode(update(["1", "new", None], old=["1", "old", "x"]))
    assert changes(decoded) == ["update_preimage", "update_postimage"]
    assert column(decoded, "doc") == ["old", "new"]
    assert column(decoded, "note") == ["x", None]
    assert column(decoded, "ordinal") == [0, 1]


def test_update_of_key_gives_preimage_of_key_columns_only() -> None:
    # A value in a non-key place of K is not PostgreSQL's, but would not be a row's value either.
    decoded = decode(update(["2", "d", "n"], key=["1", None, "stray"]))
    assert column(decoded, "id") == [1, 2]
    assert column(decoded, "doc") == [None, "d"]
    assert column(decoded, "note") == [None, "n"]
    assert column(decoded, "unchanged") == [None, None]


def test_delete_by_key_has_nulls_elsewhere_and_by_full_identity_has_all() -> None:
    decoded = decode(delete(key=["1", None, None]), delete(old=["2", "d", None]))
    assert changes(decoded) == ["delete", "delete"]
    assert column(decoded, "id") == [1, 2]
    assert column(decoded, "doc") == [None, "d"]


def test_truncate_gives_a_row_of_nulls_per_listed_table_in_listed_order() -> None:
    other = relation(("a", "int4"), relid=9, name="other")
    decoded = decode(truncate([9, 5]), insert(["1", None, None]), relations=(KEYED, other))
    first, second = decoded.tables
    assert (first.relation.relid, second.relation.relid) == (5, 9)
    assert first.batch.to_pydict()["ordinal"] == [1, 2]
    assert second.batch.to_pylist() == [
        {"change_type": rows.TRUNCATE, "owner": 0, "ordinal": 0, "unchanged": None, "text": None, "a": None}
    ]
    assert first.batch.to_pydict()["id"] == [None, 1]
    assert decoded.n_rows == 3


def test_unchanged_toast_without_old_tuple_is_null_and_named() -> None:
    decoded = decode(insert(["0", "x", "y"]), update(["1", U, U]), update(["2", "d", U]))
    assert column(decoded, "doc") == ["x", None, "d"]
    assert column(decoded, "unchanged") == [None, ["doc", "note"], ["note"]]


def test_unchanged_toast_is_filled_from_full_old_tuple() -> None:
    decoded = decode(update(["1", U, U], old=["1", "toasted", None]))
    assert column(decoded, "doc") == ["toasted", "toasted"]
    assert column(decoded, "note") == [None, None]  # known to be null: not unchanged
    assert column(decoded, "unchanged") == [None, None]


def test_toasted_key_is_filled_from_key_tuple_but_other_columns_are_not() -> None:
    table = relation(("id", "text"), ("doc", "text"), keys=["id"])
    decoded = decode(update([U, U], key=["long key", None]), relations=(table,))
    assert column(decoded, "id") == ["long key", "long key"]
    assert column(decoded, "doc") == [None, None]
    assert column(decoded, "unchanged") == [None, ["doc"]]


def test_unchanged_in_an_old_tuple_is_named_there_and_fills_nothing() -> None:
    decoded = decode(
        update(["1", U, "n"], old=["1", U, "o"]), delete(old=["2", U, "z"]), delete(key=[U, None, None])
    )
    assert column(decoded, "doc") == [None] * 4
    assert column(decoded, "unchanged") == [["doc"], ["doc"], ["doc"], ["id"]]


def test_unchanged_of_native_types_is_filled_and_named_too() -> None:
    table = relation(("id", "int4"), ("a", "int4[]"), ("b", "bytea"), ("d", "date"), keys=["id"])
    decoded = decode(
        update(["1", U, U, U], old=["1", "{1,2}", "\\x00ff", "infinity"]),
        update(["2", U, U, U]),
        relations=(table,),
    )
    assert column(decoded, "a") == [[1, 2], [1, 2], None]
    assert column(decoded, "b") == [b"\x00\xff", b"\x00\xff", None]
    assert column(decoded, "text") == [[("d", "infinity")], [("d", "infinity")], None]
    assert column(decoded, "unchanged") == [None, None, ["a", "b", "d"]]


def test_rows_of_interleaved_relations_keep_their_transaction_ordinals() -> None:
    other = relation(("a", "int4"), relid=9, name="other")
    messages = [insert([str(i), None, None]) if i % 3 else insert([str(i)], relid=9) for i in range(30)]
    decoded = decode(*messages, relations=(other, KEYED))
    by_name = {table.relation.table: table.batch.to_pydict() for table in decoded.tables}
    assert by_name["other"]["ordinal"] == by_name["other"]["a"] == list(range(0, 30, 3))
    assert by_name["t"]["ordinal"] == by_name["t"]["id"] == [i for i in range(30) if i % 3]


def test_runs_follow_subxids_over_all_tables_and_both_rows_of_an_update() -> None:
    other = relation(("a", "int4"), relid=9, name="other")
    decoded = decode(
        insert(["1", None, None], subxid=701),
        insert(["2"], subxid=701, relid=9),
        update(["2", None, None], key=["1", None, None], subxid=702),
        truncate([5, 9], subxid=701),
        logical("p", b"", xid=700),
        insert(["3", None, None], subxid=701),
        relations=(KEYED, other),
        streamed=True,
        first=100,
    )
    assert decoded.run_subxid.tolist() == [701, 702, 701]
    assert decoded.run_first.tolist() == [100, 102, 104]
    assert decoded.run_subxid.dtype == np.uint32
    assert decoded.run_first.dtype == np.int64
    assert decoded.tables[0].batch.to_pydict()["owner"] == [701, 702, 702, 701, 701]


def test_unstreamed_block_is_one_run_of_subxid_0() -> None:
    decoded = decode(insert(["1", None, None]), insert(["2", None, None]))
    assert (decoded.run_subxid.tolist(), decoded.run_first.tolist(), decoded.n_rows) == ([0], [0], 2)


def test_rows_of_rolled_back_subtransactions_are_left_out_and_the_others_numbered_without_a_gap() -> None:
    other = relation(("a", "int4"), relid=9, name="other")
    decoded = decode(
        insert(["1", None, None], subxid=700),
        insert(["2"], subxid=701, relid=9),
        update(["3", None, None], key=["1", None, None], subxid=702),
        truncate([5, 9], subxid=703),
        insert(["4"], subxid=702, relid=9),
        insert(["5", None, None], subxid=700),
        relations=(KEYED, other),
        streamed=True,
        first=100,
        aborted=(701, 703, 999),
    )
    keyed, others = (table.batch.to_pydict() for table in decoded.tables)
    assert (keyed["id"], keyed["ordinal"], keyed["owner"]) == (
        [1, 1, 3, 5],
        [100, 101, 102, 104],
        [700, 702, 702, 700],
    )
    assert (others["a"], others["ordinal"]) == ([4], [103])
    assert (decoded.run_subxid.tolist(), decoded.run_first.tolist()) == ([700, 702, 700], [100, 101, 104])
    assert decoded.n_rows == 5


def test_a_block_of_nothing_but_rolled_back_rows_has_no_table_and_none_of_their_bad_values() -> None:
    decoded = decode(insert([b"\xe9", None, None], subxid=701), streamed=True, first=7, aborted=(701,))
    assert (decoded.tables, decoded.n_rows, len(decoded.run_subxid), decoded.notes) == ((), 0, 0, ())


def test_block_without_rows_has_no_runs_and_no_tables() -> None:
    decoded = decode(logical("p", b"x", xid=700), streamed=True)
    assert (decoded.tables, decoded.n_rows, len(decoded.run_subxid)) == ((), 0, 0)
    assert decoded.messages is not None
    empty = decode()
    assert (empty.tables, empty.n_rows, empty.messages, len(empty.run_first)) == ((), 0, None, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_logical_messages_keep_prefix_binary_content_and_lsn(streamed: bool) -> None:
    xid = 700 if streamed else None
    decoded = decode(
        logical("é", b"\0\xff", lsn=77, xid=xid), logical("", b"", lsn=78, xid=xid), streamed=streamed
    )
    assert decoded.messages is not None
    decoded.messages.validate(full=True)
    assert decoded.messages.schema == rows.MESSAGES_SCHEMA
    common = {"commit_lsn": None, "xid": 700, "transactional": True}
    assert decoded.messages.to_pylist() == [
        {**common, "lsn": 77, "prefix": "é", "content": b"\0\xff"},
        {**common, "lsn": 78, "prefix": "", "content": b""},
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prefix_that_is_not_utf_8_has_its_bytes_written_out_and_the_others_are_as_they_were(
    streamed: bool,
) -> None:
    """Of a SQL_ASCII database: it stopped the run, though nothing is found by a prefix."""
    xid = 700 if streamed else None
    sent = [logical(b"caf\xe9", b"1", lsn=77, xid=xid), logical("é", b"2", lsn=78, xid=xid)]
    decoded = decode(*sent, streamed=streamed)
    assert decoded.messages is not None
    assert decoded.messages.column("prefix").to_pylist() == ["caf\\xe9", "é"]


def test_streamed_message_of_another_transaction_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="another top-level"):
        decode(logical("p", b"", xid=999), streamed=True)


def test_message_without_transaction_has_no_place_in_a_transaction_block() -> None:
    with pytest.raises(IllegalTransition):
        decode(logical("p", b"", flags=0))


def test_binary_value_is_unsupported_naming_relation_and_column() -> None:
    with pytest.raises(Unsupported, match=r"public\.t column doc came in binary"):
        decode(insert(["1", B, None]))


def test_table_without_columns_still_has_rows() -> None:
    table = relation()
    decoded = decode(insert([]), truncate([5]), relations=(table,))
    assert changes(decoded) == ["insert", "truncate"]


def test_null_empty_and_long_texts_stay_apart() -> None:
    long = "ä" * 70_000
    decoded = decode(insert(["1", "", long]), insert(["2", None, ""]))
    assert column(decoded, "doc") == ["", None]
    assert column(decoded, "note") == [long, ""]


def test_result_does_not_hold_the_payload() -> None:
    table = relation(
        ("a", "int8"), ("t", "text"), ("f", "float8"), ("b", "bytea"), ("x", "text[]"), ("d", "date")
    )
    payload, lengths = block(
        insert(["1", "text", "2.5", "\\xab", '{"q",r}', "infinity"]), logical("p", b"content")
    )
    # A writable owner, so that a view that were kept would show the overwriting.
    payload, lengths = payload.copy(), lengths.copy()
    alive = weakref.ref(payload)
    decoded = decode_transaction_block(payload, lengths, {5: table}, streamed=False, xid=1, first_ordinal=0)
    before = [t.batch.to_pylist() for t in decoded.tables]
    payload[:] = 0
    lengths[:] = 0
    assert [t.batch.to_pylist() for t in decoded.tables] == before
    assert decoded.messages is not None
    assert decoded.messages.to_pylist()[0]["content"] == b"content"
    del payload
    gc.collect()
    assert alive() is None


def test_release_takes_what_the_decoder_gives() -> None:
    decoded = decode(insert(["1", "a", "b"], subxid=701), insert(["2", U, "d"], subxid=702), streamed=True)
    stamp = rows.Stamp.of_one(10, 20, 700)
    released = rows.release(decoded.tables[0].batch, KEYED, stamp)
    released.validate(full=True)
    _, row = released.to_pylist()
    assert (row["id"], row["_seq"], row["_unchanged"], row["_xid"]) == (2, 1, ["doc"], 700)


def test_batches_of_one_commit_that_share_their_constants_are_what_they_were_by_themselves() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    stamps = [rows.Stamp.of_one(rng.randrange(1 << 60), rng.randrange(1 << 50), 700 + i) for i in range(3)]
    for _ in range(40):
        n, stamp = rng.choice((1, 2, 4095, 4096, 4097, 9000)), rng.choice(stamps)
        messages = [insert([str(i), "a", "b"]) for i in range(n)]
        if rng.random() < 0.3:
            messages[rng.randrange(n)] = delete(key=["1", None, None])
        released = rows.release(decode(*messages).tables[0].batch, KEYED, stamp)
        released.validate(full=True)
        kinds = ["delete" if change[0] == ord("D") else "insert" for change in messages]
        assert released.column("_change_type").to_pylist() == kinds, f"seed {seed}"
        for name, values in (
            ("_commit_lsn", stamp.commit_lsn),
            ("_xid", stamp.xid),
            ("_commit_timestamp", stamp.commit_timestamp_us),
        ):
            found = released.column(name).cast(pa.int64()).to_pylist()
            assert found == [int(values[0])] * n, f"seed {seed}"


def test_ipc_round_trip_of_a_batch_with_exceptions() -> None:
    table = relation(("id", "int4"), ("d", "date"), ("a", "date[]"))
    decoded = decode(insert(["1", "infinity", "{2024-01-01}"]), update([U, "2024-01-01", "{{2024-01-01}}"]),
                     relations=(table,))  # fmt: skip
    batch = decoded.tables[0].batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        again = reader.read_next_batch()
    again.validate(full=True)
    assert again.equals(batch)
    assert batch.to_pydict()["text"] == [[("d", "infinity")], [("a", "{{2024-01-01}}")]]


def test_warm_up_twice_is_harmless() -> None:
    warm_up()
    warm_up()


def test_tuple_builder_writes_the_manuals_layout() -> None:
    assert tuple_data(["a", None, U]) == b"\0\3t\0\0\0\1anu"
