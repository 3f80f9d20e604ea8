"""The layout of every message: bytes that PostgreSQL 18.4 sent, and the messages that they mean.

The bytes were captured from a server, not made by our writer, so parser and writer cannot be wrong together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pgoutput.messages import (
    ColumnKind,
    Delete,
    Insert,
    Message,
    StandbyStatusUpdate,
    Truncate,
    TupleColumn,
    TupleData,
    Update,
    XLogData,
)
from tests.pgoutput.parser import parse_copy_header, parse_message, parse_standby_status_update
from tests.pgoutput.writer import keepalive, write, write_standby_status_update, xlog_data
from xidstream.pipeline.errors import MalformedMessage, PoisonedChange, UsageError
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn, Xid
from xidstream.pipeline.pgoutput.message_buffer import HEADER_BYTES
from xidstream.pipeline.pgoutput.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Keepalive,
    LogicalMessage,
    MessageType,
    Origin,
    Prepare,
    Relation,
    RelationColumn,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Type,
)
from xidstream.pipeline.pgoutput.parser import parse_keepalive

LSN = Lsn.parse("0/16B3748")


def text(value: str) -> TupleColumn:
    return TupleColumn(ColumnKind.TEXT, value.encode())


NULL = TupleColumn(ColumnKind.NULL)
UNCHANGED = TupleColumn(ColumnKind.UNCHANGED)


def row(*columns: TupleColumn) -> TupleData:
    return TupleData(columns)


def wire_time(wire_us: int) -> int:
    return wire_us + POSTGRES_EPOCH_UNIX_US


def column(name: str, oid: int, modifier: int = -1, *, key: bool = False) -> RelationColumn:
    return RelationColumn(key, name, oid, modifier)


@dataclass(frozen=True)
class Captured:
    scenario: str
    wire: bytes
    message: Message
    in_stream: bool = False
    parallel: bool = False

    def parse(self, data: bytes | memoryview, offset: int = 0) -> Message:
        return parse_message(data, in_stream=self.in_stream, parallel=self.parallel, lsn=LSN, offset=offset)


def captured(scenario: str, wire: str, message: Message, **how: bool) -> Captured:
    return Captured(scenario, bytes.fromhex(wire), message, **how)


GID = "gid é'1"

CAPTURED = (
    captured(
        "begin",
        "42 000000000172f250 000303bf0360e710 000002f9",
        Begin(Lsn(0x172F250), wire_time(0x303BF0360E710), Xid(761)),
    ),
    captured(
        "commit",
        "43 00 000000000172f250 000000000172f280 000303bf0360e710",
        Commit(Lsn(0x172F250), Lsn(0x172F280), wire_time(0x303BF0360E710)),
    ),
    captured(
        "origin_of_a_plain_transaction",
        "4f 0000000000001234 c3b6726967696e00",
        Origin(Lsn(0x1234), "örigin"),
    ),
    captured(
        "origin_has_no_xid_and_no_lsn_in_a_stream",
        "4f 0000000000000000 c3b6726967696e00",
        Origin(Lsn(0), "örigin"),
        in_stream=True,
    ),
    captured(
        "relation",
        "52 00004000 7075626c696300 7400 64 0004 01 696400 00000017 ffffffff 00 7600 00000019 ffffffff"
        "00 6e00 000006a4 000a0006 00 62696700 00000019 ffffffff",
        Relation(
            None,
            16384,
            "public",
            "t",
            "d",
            (column("id", 23, key=True), column("v", 25), column("n", 1700, 655366), column("big", 25)),
        ),
    ),
    captured(
        "relation_with_replica_identity_full_in_a_stream",
        "52 00000304 00004008 7075626c696300 6600 66 0002 01 696400 00000017 ffffffff"
        "01 7600 00000019 ffffffff",
        Relation(
            Xid(772), 16392, "public", "f", "f", (column("id", 23, key=True), column("v", 25, key=True))
        ),
        in_stream=True,
    ),
    captured(
        "relation_without_columns_in_pg_catalog",
        "52 00004000 00 7400 6e 0000",
        Relation(None, 16384, "pg_catalog", "t", "n", ()),
    ),
    captured(
        "type_names_the_base_type_of_a_domain",
        "59 0000400e 00 6e756d6572696300",
        Type(None, 16398, "pg_catalog", "numeric"),
    ),
    captured(
        "type_in_a_stream_carries_the_subxid",
        "59 00000306 0000400e 00 6e756d6572696300",
        Type(Xid(774), 16398, "pg_catalog", "numeric"),
        in_stream=True,
    ),
    captured(
        "insert",
        "49 00004000 4e 0004 74 00000005 3737373737 6e 6e 6e",
        Insert(None, 16384, row(text("77777"), NULL, NULL, NULL)),
    ),
    captured(
        "insert_in_a_stream",
        "49 00000304 00004000 4e 0004 74 00000001 31 74 00000001 76 74 00000004 312e3030 74 00000001 7a",
        Insert(Xid(772), 16384, row(text("1"), text("v"), text("1.00"), text("z"))),
        in_stream=True,
    ),
    captured(
        "insert_in_binary",
        "49 00004000 4e 0002 62 00000004 00000001 62 00000000",
        Insert(
            None, 16384, row(TupleColumn(ColumnKind.BINARY, b"\0\0\0\1"), TupleColumn(ColumnKind.BINARY, b""))
        ),
    ),
    captured(
        "update_leaves_an_unchanged_toast_value_out",
        "55 00004000 4e 0004 74 00000001 31 74 00000001 62 74 00000004 312e3530 75",
        Update(None, 16384, None, None, row(text("1"), text("b"), text("1.50"), UNCHANGED)),
    ),
    captured(
        "update_of_the_key_sends_the_key_tuple",
        "55 00004000 4b 0004 74 00000001 32 6e 6e 6e 4e 0004 74 00000001 33 6e 6e 6e",
        Update(None, 16384, row(text("2"), NULL, NULL, NULL), None, row(text("3"), NULL, NULL, NULL)),
    ),
    captured(
        "update_under_replica_identity_full_in_a_stream",
        "55 00000307 00004008 4f 0002 74 00000001 31 74 00000001 78 4e 0002 74 00000001 31 74 00000001 75",
        Update(Xid(775), 16392, None, row(text("1"), text("x")), row(text("1"), text("u"))),
        in_stream=True,
    ),
    captured(
        "delete_by_key_in_a_stream",
        "44 00000307 00004000 4b 0004 74 00000001 31 6e 6e 6e",
        Delete(Xid(775), 16384, row(text("1"), NULL, NULL, NULL), None),
        in_stream=True,
    ),
    captured(
        "delete_under_replica_identity_full",
        "44 00004008 4f 0002 74 00000001 31 74 00000001 77",
        Delete(None, 16392, None, row(text("1"), text("w"))),
    ),
    captured(
        "truncate_of_two_tables_restart_identity",
        "54 00000002 02 00004000 00004008",
        Truncate(None, False, True, (16384, 16392)),
    ),
    captured(
        "truncate_in_a_stream",
        "54 00000307 00000001 00 00004008",
        Truncate(Xid(775), False, False, (16392,)),
        in_stream=True,
    ),
    captured("truncate_cascade", "54 00000001 01 00004000", Truncate(None, True, False, (16384,))),
    captured(
        "message_that_is_not_transactional",
        "4d 00 000000000172f750 7072c3a466697800 00000007 6f757473696465",
        LogicalMessage(None, False, Lsn(0x172F750), "präfix", b"outside"),
    ),
    captured(
        "message_in_a_stream_carries_the_top_level_xid",
        "4d 00000304 01 00000000017d6c10 696e00 00000006 73747265616d",
        LogicalMessage(Xid(772), True, Lsn(0x17D6C10), "in", b"stream"),
        in_stream=True,
    ),
    captured("stream_start_of_the_first_block", "53 00000304 01", StreamStart(Xid(772), True)),
    captured("stream_start_of_a_later_block", "53 00000304 00", StreamStart(Xid(772), False)),
    captured("stream_stop", "45", StreamStop(), in_stream=True),
    captured(
        "stream_commit",
        "63 00000304 00 0000000001915ca0 0000000001915db8 000303bf03613182",
        StreamCommit(Xid(772), Lsn(0x1915CA0), Lsn(0x1915DB8), wire_time(0x303BF03613182)),
    ),
    captured(
        "stream_abort_of_a_subtransaction",
        "41 00000304 00000306",
        StreamAbort(Xid(772), Xid(774)),
    ),
    captured(
        "stream_abort_under_parallel_streaming",
        "41 00000304 00000306 0000000001915ca0 000303bf03613182",
        StreamAbort(Xid(772), Xid(774), Lsn(0x1915CA0), wire_time(0x303BF03613182)),
        parallel=True,
    ),
    captured(
        "begin_prepare",
        "62 00000000019d5180 00000000019d5280 000303bf0361496e 00000309 67696420c3a9273100",
        BeginPrepare(Lsn(0x19D5180), Lsn(0x19D5280), wire_time(0x303BF0361496E), Xid(777), GID),
    ),
    captured(
        "prepare",
        "50 00 00000000019d5180 00000000019d5280 000303bf0361496e 00000309 67696420c3a9273100",
        Prepare(Lsn(0x19D5180), Lsn(0x19D5280), wire_time(0x303BF0361496E), Xid(777), GID),
    ),
    captured(
        "commit_prepared",
        "4b 00 00000000019d5490 00000000019d54c8 000303bf03614a63 0000030a 736d616c6c00",
        CommitPrepared(Lsn(0x19D5490), Lsn(0x19D54C8), wire_time(0x303BF03614A63), Xid(778), "small"),
    ),
    captured(
        "rollback_prepared",
        "72 00 00000000019d5280 00000000019d5540 000303bf0361496e 000303bf03614aa5 00000309"
        "67696420c3a9273100",
        RollbackPrepared(
            Lsn(0x19D5280),
            Lsn(0x19D5540),
            wire_time(0x303BF0361496E),
            wire_time(0x303BF03614AA5),
            Xid(777),
            GID,
        ),
    ),
    captured(
        "stream_prepare",
        "70 00 0000000001a34eb0 0000000001a34fa8 000303bf036154f8 0000030c 6269673200",
        StreamPrepare(Lsn(0x1A34EB0), Lsn(0x1A34FA8), wire_time(0x303BF036154F8), Xid(780), "big2"),
    ),
)

every_message = pytest.mark.parametrize("case", CAPTURED, ids=lambda case: case.scenario)


def test_every_type_of_message_was_captured() -> None:
    assert {case.wire[0] for case in CAPTURED} == set(MessageType)


@every_message
def test_the_servers_bytes_are_read(case: Captured) -> None:
    assert case.parse(case.wire) == case.message


@every_message
def test_the_servers_bytes_are_written_again(case: Captured) -> None:
    assert write(case.message) == case.wire


@every_message
def test_a_message_is_read_in_place_behind_its_header(case: Captured) -> None:
    data = xlog_data(LSN, case.wire)
    assert case.parse(memoryview(data), offset=HEADER_BYTES) == case.message
    assert case.parse(data, offset=HEADER_BYTES) == case.message


@every_message
def test_a_message_cut_short_anywhere_is_malformed_and_names_its_type_and_lsn(case: Captured) -> None:
    title = case.message.type.title
    for n_bytes in range(len(case.wire)):
        for data in (case.wire[:n_bytes], memoryview(case.wire)[:n_bytes]):
            with pytest.raises(MalformedMessage) as raised:
                case.parse(data)
            assert "0/16B3748" in str(raised.value)
            assert title in str(raised.value) or n_bytes == 0


@every_message
@pytest.mark.parametrize("tail", [b"\0", b"n", b"\0\0\0\0", bytes(16)])
def test_bytes_left_over_are_malformed(case: Captured, tail: bytes) -> None:
    with pytest.raises(MalformedMessage):
        case.parse(case.wire + tail)


STREAMABLE = [case for case in CAPTURED if chr(case.wire[0]) in "RYIUDT"]


@pytest.mark.parametrize("case", STREAMABLE, ids=lambda case: case.scenario)
def test_reading_a_row_message_for_the_wrong_place_never_gives_the_same_message(case: Captured) -> None:
    wrong = dataclasses.replace(case, in_stream=not case.in_stream)
    try:
        message = wrong.parse(case.wire)
    except MalformedMessage:
        return
    assert message != case.message


@pytest.mark.parametrize("parallel", [False, True])
def test_a_stream_abort_of_the_other_streaming_mode_is_malformed(parallel: bool) -> None:
    message = StreamAbort(Xid(1), Xid(2)) if parallel else StreamAbort(Xid(1), Xid(2), Lsn(3), 4)
    with pytest.raises(MalformedMessage, match="STREAM ABORT"):
        parse_message(write(message), in_stream=False, parallel=parallel, lsn=LSN)


BAD = {
    "unknown_message_type": "51 00000000",
    "unknown_column_kind": "49 00004000 4e 0001 78",
    "insert_with_a_key_marker": "49 00004000 4b 0001 6e",
    "update_with_an_unknown_marker": "55 00004000 44 0001 6e",
    "update_with_two_old_tuples": "55 00004000 4b 0001 6e 4f 0001 6e 4e 0001 6e",
    "update_with_a_key_and_no_new_tuple": "55 00004000 4b 0001 6e",
    "delete_with_a_new_tuple": "44 00004000 4e 0001 6e",
    "negative_number_of_columns": "49 00004000 4e ffff" + "6e" * 65535,
    "more_columns_than_bytes": "49 00004000 4e 7fff 6e",
    "negative_length_of_a_value": "49 00004000 4e 0001 74 ffffffff",
    "value_longer_than_the_message": "49 00004000 4e 0001 74 7fffffff 31",
    "negative_number_of_relations": "54 ffffffff 00",
    "more_relations_than_bytes": "54 7fffffff 00 00004000",
    "unknown_truncate_option": "54 00000000 04",
    "message_content_of_negative_length": "4d 00 0000000000000001 7000 ffffffff",
    "unknown_message_flag": "4d 02 0000000000000001 7000 00000000",
    "unterminated_prefix": "4d 00 0000000000000001 7070",
    "relation_of_negative_column_count": "52 00004000 7000 7400 64 ffff",
    "relation_with_more_columns_than_bytes": "52 00004000 7000 7400 64 0002 00 6100 00000017 ffffffff",
    "unknown_replica_identity": "52 00004000 7000 7400 78 0000",
    "unknown_column_flag": "52 00004000 7000 7400 64 0001 02 6100 00000017 ffffffff",
    "unknown_commit_flag": "43 01 0000000000000001 0000000000000001 0000000000000001",
    "unknown_stream_commit_flag": "63 00000001 80 0000000000000001 0000000000000001 0000000000000001",
    "unknown_prepare_flag": "50 01 0000000000000001 0000000000000001 0000000000000001 00000001 6700",
    "unknown_rollback_flag": "72 01" + "0000000000000001" * 4 + "00000001 6700",
    "stream_start_that_is_neither_first_nor_not": "53 00000001 02",
}


@pytest.mark.parametrize("scenario", BAD)
def test_malformed(scenario: str) -> None:
    with pytest.raises(MalformedMessage) as raised:
        parse_message(bytes.fromhex(BAD[scenario]), in_stream=False, lsn=LSN)
    assert "0/16B3748" in str(raised.value)
    # The decoder's error would carry the bytes along.
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        ("52 00004000 ff00 7400 64 0000", "the schema's name"),
        ("52 00004000 7000 ff00 64 0000", "the relation's name"),
        ("52 00004000 7000 7400 64 0001 00 e900 00000017 ffffffff", "a column's name"),
    ],
)
def test_a_table_or_column_of_a_sql_ascii_database_that_is_not_utf8_is_poison_and_no_fault_of_the_server(
    wire: str, what: str
) -> None:
    with pytest.raises(
        PoisonedChange, match=f"RELATION message at 0/16B3748: {what} is not valid UTF-8"
    ) as raised:
        parse_message(bytes.fromhex(wire), in_stream=False, lsn=LSN)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert "publication" in raised.value.remedy


LABELS = {
    "type": ("59 00004000 ff00 c32800", lambda m: (m.schema, m.name), (r"\xff", r"\xc3(")),
    "gid": (
        "4b 00 0000000000000001 0000000000000001 0000000000000001 00000001 61e900",
        lambda m: m.gid,
        r"a\xe9",
    ),
    "origin": ("4f 0000000000000000 c3a9fe00", lambda m: m.name, r"é\xfe"),
    "prefix": (
        "4d 00 0000000000000001 ff00 00000001 fe",
        lambda m: (m.prefix, m.content),
        (r"\xff", b"\xfe"),
    ),
}


@pytest.mark.parametrize("scenario", LABELS)
def test_what_nothing_is_found_by_has_the_bytes_that_are_not_utf8_written_out(scenario: str) -> None:
    wire, field_of, expected = LABELS[scenario]
    assert field_of(parse_message(bytes.fromhex(wire), in_stream=False, lsn=LSN)) == expected


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("more_columns_than_bytes", "32767 columns of the new tuple in 1 bytes"),
        ("negative_number_of_columns", "-1 columns of the new tuple"),
        ("relation_with_more_columns_than_bytes", "2 columns in 11 bytes"),
        ("more_relations_than_bytes", "2147483647 relations in 4 bytes"),
        ("negative_length_of_a_value", "has the length -1"),
        ("message_content_of_negative_length", "has the length -1"),
    ],
)
def test_a_count_is_refused_for_itself_before_anything_is_read_by_it(scenario: str, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        parse_message(bytes.fromhex(BAD[scenario]), in_stream=False, lsn=LSN)


@pytest.mark.parametrize("offset", [-1, 1, 100])
def test_an_offset_outside_of_the_message_is_malformed(offset: int) -> None:
    with pytest.raises(MalformedMessage):
        parse_message(b"E", in_stream=True, lsn=LSN, offset=offset)


def test_a_name_longer_than_a_search_step_is_read_whole() -> None:
    for n in (127, 128, 129, 255, 256, 257, 384, 512, 1000):
        message = LogicalMessage(None, False, LSN, "é" * n, b"\0" * 300)
        assert parse_message(memoryview(write(message)), in_stream=False, lsn=LSN) == message


def test_parsing_keeps_no_reference_to_the_buffer() -> None:
    buffer = bytearray(write(Insert(None, 1, row(text("kept")))))
    message = parse_message(memoryview(buffer), in_stream=False, lsn=LSN)
    buffer[:] = bytes(len(buffer))
    assert message == Insert(None, 1, row(text("kept")))


# -- CopyData --------------------------------------------------------------------------------------------


def test_xlog_data_header() -> None:
    data = xlog_data(LSN, b"E", send_timestamp_us=wire_time(5))
    assert data == bytes.fromhex("77 00000000016b3748 00000000016b3748 0000000000000005 45")
    assert parse_copy_header(data) == XLogData(LSN, LSN, wire_time(5))
    assert parse_copy_header(memoryview(data)) == parse_copy_header(data)


def test_keepalive() -> None:
    data = keepalive(LSN, reply_requested=True, send_timestamp_us=wire_time(-5))
    assert data == bytes.fromhex("6b 00000000016b3748 fffffffffffffffb 01")
    assert parse_keepalive(data) == Keepalive(LSN, wire_time(-5), True)


def test_standby_status_update() -> None:
    update = StandbyStatusUpdate(Lsn(3), Lsn(2), Lsn(1), wire_time(9), True)
    data = write_standby_status_update(update)
    assert data == bytes.fromhex("72 0000000000000003 0000000000000002 0000000000000001 0000000000000009 01")
    assert parse_standby_status_update(data) == update


@pytest.mark.parametrize(
    ("parse", "data"),
    [
        (parse_copy_header, xlog_data(LSN, b"")),
        (parse_keepalive, keepalive(LSN)),
        (parse_standby_status_update, write_standby_status_update(StandbyStatusUpdate(LSN, LSN, LSN, 0))),
    ],
    ids=["xlog_data", "keepalive", "standby_status_update"],
)
def test_copy_data_cut_short_or_of_another_type_is_malformed(parse: Any, data: bytes) -> None:
    for n_bytes in range(len(data)):
        with pytest.raises(MalformedMessage):
            parse(data[:n_bytes])
    with pytest.raises(MalformedMessage, match="0/16B3748"):
        parse(b"x" + data[1:])


def test_keepalive_with_an_unknown_reply_byte_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        parse_keepalive(keepalive(LSN)[:-1] + b"\2")


# -- what the wire cannot hold -----------------------------------------------------------------------------

WIDE = 1 << 63


@pytest.mark.parametrize(
    "message",
    [
        Origin(LSN, "a\0b"),
        Origin(LSN, "\ud800"),
        Insert(None, 1 << 32, row()),
        Insert(None, 1, TupleData((NULL,) * 40_000)),
        Commit(LSN, LSN, WIDE + POSTGRES_EPOCH_UNIX_US),
    ],
    ids=["nul_in_a_name", "surrogate_in_a_name", "wide_oid", "too_many_columns", "wide_timestamp"],
)
def test_what_the_wire_cannot_hold_is_a_usage_error(message: Message) -> None:
    with pytest.raises(UsageError):
        write(message)


def test_a_copy_message_with_a_field_too_wide_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        keepalive(LSN, send_timestamp_us=WIDE + POSTGRES_EPOCH_UNIX_US)
