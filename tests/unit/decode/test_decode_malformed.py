"""Whatever the bytes are, the decoder gives a result or an error of ours: no other exception, no crash."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.decode.builder import (
    OIDS,
    U,
    begin,
    block,
    commit,
    delete,
    insert,
    logical,
    numeric_modifier,
    origin,
    relation,
    truncate,
    update,
)
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block
from xidstream.pipeline.errors import MalformedMessage, ProtocolViolation, UsageError, XidstreamError

TABLE = relation(("id", "int4"), ("doc", "text"), keys=["id"])
EVERY = relation(
    *((f"c{i}", name, numeric_modifier(20, 3)) for i, name in enumerate(OIDS)),
    keys=["c0", "c4"],
    relid=6,
    name="every",
)
KNOWN = {5: TABLE, 6: EVERY}
_SAMPLES = {
    "bool": "t", "bytea": "\\x00ff", "int8": "-5", "int2": "7", "int4": "123", "oid": "9", "float4": "1.5",
    "float8": "2e10", "date": "2024-02-29", "timestamp": "2024-01-01 01:02:03.5",
    "numeric": "-12345678901234567.125", "timestamptz": "2024-01-01 01:02:03+00", "bool[]": "{t,f}",
    "bytea[]": '{"\\\\x00"}', "int2[]": "{1,NULL}", "int4[]": "{1,2}", "int8[]": "{}", "float4[]": "{1}",
    "float8[]": "{NaN}", "text[]": '{a,"b \\" c",NULL}', "date[]": "{infinity,2024-01-01}",
    "timestamp[]": '{"2024-01-01 00:00:00"}', "numeric[]": "{1.500}", "uuid[]": "{a,b}",
    "timestamptz[]": '{"2024-01-01 00:00:00+00"}',
}  # fmt: skip
SAMPLE = [_SAMPLES.get(name, "some tëxt") for name in OIDS]


def _changes(subxid: int | None) -> list[bytes]:
    return [
        insert(SAMPLE, subxid=subxid, relid=6),
        insert(["1", "d"], subxid=subxid),
        update(["2", U], key=["1", None], subxid=subxid),
        update(["2", U], old=["1", "o"], subxid=subxid),
        update([U] * len(OIDS), old=SAMPLE, subxid=subxid, relid=6),
        delete(old=["1", "o"], subxid=subxid),
        truncate([5, 6], subxid=subxid),
        logical("prefix", b"content", xid=700 if subxid is not None else None),
    ]


PLAIN = block(
    begin(1, 700),
    origin("o"),
    *_changes(None),
    commit(1),
    logical("p", b"", flags=0),
    begin(2, 701),
    commit(2),
)
UNSTREAMED = block(*_changes(None))
STREAMED = block(*_changes(701))


def _decode(kind: str, payload: Any, lengths: Any) -> Any:
    if kind == "plain":
        return decode_plain_block(payload, lengths, KNOWN)
    return decode_transaction_block(
        payload, lengths, KNOWN, streamed=kind == "streamed", xid=700, first_ordinal=0
    )


def _survives(kind: str, payload: Any, lengths: Any) -> None:
    try:
        decoded = _decode(kind, payload, lengths)
    except XidstreamError:
        return
    for table in decoded.tables:
        table.batch.validate(full=True)
    if decoded.messages is not None:
        decoded.messages.validate(full=True)


BLOCKS = {"plain": PLAIN, "unstreamed": UNSTREAMED, "streamed": STREAMED}


@pytest.mark.parametrize("kind", BLOCKS)
def test_samples_are_valid(kind: str) -> None:
    assert _decode(kind, *BLOCKS[kind]).n_rows == 11


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_single_byte_changed(kind: str) -> None:
    payload, lengths = BLOCKS[kind]
    for place in range(len(payload)):
        for value in (0, 0x7F, 0xFF):
            changed = payload.copy()
            changed[place] = value
            _survives(kind, changed, lengths)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_message_cut_at_every_place(kind: str) -> None:
    payload, lengths = BLOCKS[kind]
    ends = np.cumsum(lengths)
    for m, end in enumerate(ends):
        for n_cut_off in range(1, int(lengths[m]) + 1):
            shorter = lengths.copy()
            shorter[m] -= n_cut_off
            with pytest.raises(XidstreamError):
                _decode(kind, np.delete(payload, slice(end - n_cut_off, end)), shorter)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_message_one_byte_too_long_is_malformed(kind: str) -> None:
    payload, lengths = BLOCKS[kind]
    for m, end in enumerate(np.cumsum(lengths)):
        longer = lengths.copy()
        longer[m] += 1
        with pytest.raises(MalformedMessage):
            _decode(kind, np.insert(payload, end, 0), longer)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from(sorted(BLOCKS)),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=6)), min_size=1, max_size=6),
)
def test_random_bytes_overwritten(kind: str, writes: list[tuple[int, bytes]]) -> None:
    payload, lengths = BLOCKS[kind]
    changed = payload.copy()
    for place, data in writes:
        at = place % (len(changed) - len(data))
        changed[at : at + len(data)] = np.frombuffer(data, np.uint8)
    _survives(kind, changed, lengths)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(BLOCKS)),
    st.lists(st.tuples(st.sampled_from(b"IUDTMBCO"), st.binary(max_size=60)), max_size=4),
)
def test_random_messages(kind: str, bodies: list[tuple[int, bytes]]) -> None:
    _survives(kind, *block(*(bytes([code]) + body for code, body in bodies)))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(OIDS)), st.lists(st.binary(max_size=24), min_size=1, max_size=4))
def test_random_values_of_every_type(type_: str, values: list[bytes]) -> None:
    _survives_values(type_, values)


def _survives_values(type_: str, values: list[bytes]) -> None:
    table = relation(("c", type_, numeric_modifier(20, 3)))
    try:
        decoded = decode_transaction_block(
            *block(*(insert([value]) for value in values)), {5: table}, streamed=False, xid=1, first_ordinal=0
        )
    except XidstreamError:
        return
    decoded.tables[0].batch.validate(full=True)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(["int4[]", "text[]", "bytea[]", "date[]"]),
    st.lists(st.text('{}[]",\\NUL1x0:= -', max_size=12), min_size=1, max_size=4),
)
def test_random_array_syntax(type_: str, values: list[str]) -> None:
    _survives_values(type_, [value.encode() for value in values])


def test_lengths_that_do_not_add_up_are_our_own_fault() -> None:
    payload, lengths = UNSTREAMED
    for wrong in (lengths[:-1], lengths + np.int32(1), np.append(lengths, np.int32(0))[:0]):
        with pytest.raises(UsageError, match="add up"):
            _decode("unstreamed", payload, wrong)


def test_zero_and_negative_lengths_are_malformed() -> None:
    payload, lengths = UNSTREAMED
    for more in ([0], [-5, 5], [25, -25]):
        with pytest.raises(MalformedMessage):
            _decode("unstreamed", payload, np.concatenate((np.array(more, np.int32), lengths)))


def test_missing_copydata_header_is_malformed() -> None:
    payload, lengths = UNSTREAMED
    changed = payload.copy()
    changed[0] = ord("k")
    with pytest.raises(MalformedMessage, match="CopyData header"):
        _decode("unstreamed", changed, lengths)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_column_count_that_differs_names_the_relation(n: int) -> None:
    with pytest.raises(ProtocolViolation, match=rf"tuple of {n} columns, but public\.t has 2"):
        _decode("unstreamed", *block(insert(["1", "2", "3"][:n])))


def test_truncate_of_more_tables_than_it_lists_is_malformed() -> None:
    message = b"T" + struct.pack(">IBI", 0xFFFFFFFF, 0, 5)
    with pytest.raises(MalformedMessage, match="'T' at LSN"):
        _decode("unstreamed", *block(message))


@pytest.mark.parametrize("message", [b"I" + struct.pack(">I", 5) + b"K", b"D" + struct.pack(">I", 5) + b"N",
                                     b"U" + struct.pack(">I", 5) + b"X"])  # fmt: skip
def test_tuple_tags_that_a_message_may_not_have(message: bytes) -> None:
    with pytest.raises(MalformedMessage, match="tuple tag"):
        _decode("unstreamed", *block(message + b"\0\0"))


def test_arrays_of_another_layout_are_taken_too() -> None:
    payload, lengths = UNSTREAMED
    strided = np.repeat(lengths.astype(np.int64), 2)[::2]
    assert _decode("unstreamed", payload, strided).n_rows == 11
