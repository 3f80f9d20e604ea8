"""A damaged stream, through all that reads bytes: cutter, parser, grammar, relations and the compiled decoder.

Whatever was changed, cut off, left out, repeated or exchanged, the end is rows or one of the project's errors:
never another exception, a hang, or memory out of proportion to what came in.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fake_libpq import events_of
from tests.wire import Wire
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.stream import PlainBlock, StreamCutter, StreamEvent, TransactionBlock

_MEMORY_LIMIT_BYTES = 32 << 20
"""The stream has some kilobytes; a length of 2 GB that was believed would show."""


def a_stream() -> list[bytes]:
    """Plain and streamed transactions, a subtransaction's abort, two-phase, messages, two relations."""
    wire = Wire()
    wire.begin(700, 0x5000)
    wire.origin("upstream")
    wire.relation(columns=("a", "b"))
    for i in range(3):
        wire.insert(str(i), "some text")
    wire.message(b"content", transactional=True)
    wire.commit(0x5000)
    wire.message(b"outside", transactional=False)
    for first in (True, False):
        for xid in (710, 720):
            wire.start(xid, first=first)
            wire.relation(relid=2, table="u", columns=("x",))
            wire.insert("in the stream", relid=2)
            wire.insert("in a subtransaction", relid=2, subxid=xid + 1)
            wire.stop()
    wire.stream_abort(710, 711)
    wire.stream_commit(710, 0x6000)
    wire.stream_prepare(720, "gid", 0x6100)
    wire.begin_prepare(730, "other gid", 0x6200)
    wire.relation(columns=("a", "b"))
    wire.insert("3", None)
    wire.prepare(730, "other gid", 0x6200)
    wire.commit_prepared(730, "other gid", 0x7000)
    wire.rollback_prepared(720, "gid", 0x6104, 0x7100)
    return wire.take()


STREAM = a_stream()


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    messages = list(STREAM)
    for _ in range(draw(st.integers(1, 4))):
        if not messages:
            break
        at = draw(st.integers(0, len(messages) - 1))
        what = draw(st.sampled_from(("byte", "bytes", "cut", "longer", "leave out", "repeat", "exchange")))
        data = bytearray(messages[at])
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        if what == "byte" and data:
            data[place] = draw(st.integers(0, 255))
        elif what == "bytes":
            given_ = draw(
                st.sampled_from(
                    (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00" * 4, b"\x80\x00\x00\x00", b"\xff" * 8)
                )
            )
            data[place : place + len(given_)] = given_
        elif what == "cut":
            del data[place:]
        elif what == "longer":
            data += draw(st.binary(min_size=1, max_size=9))
        elif what == "leave out":
            del messages[at]
            continue
        elif what == "repeat":
            messages.insert(draw(st.integers(0, len(messages))), bytes(data))
            continue
        elif what == "exchange":
            other = draw(st.integers(0, len(messages) - 1))
            messages[at], messages[other] = messages[other], messages[at]
            continue
        messages[at] = bytes(data)
    return messages


def read(messages: list[bytes], *, parallel: bool, block_bytes: int) -> int:
    """The rows that the blocks hold."""
    cutter = StreamCutter(block_bytes=block_bytes, pending_limit_bytes=4 * block_bytes, parallel=parallel)
    events = [event for data in messages for event in cutter.feed(data)]
    events += [*cutter.flush(), *cutter.flush_open()]
    n_rows = 0
    for event in events:
        if isinstance(event, PlainBlock) and event.block is not None:
            block = event.block
            n_rows += decode_plain_block(block.payload, block.lengths, block.relations.relations).n_rows
        elif isinstance(event, TransactionBlock):
            block = event.block
            n_rows += decode_transaction_block(
                block.payload,
                block.lengths,
                block.relations.relations,
                streamed=event.streamed,
                xid=event.xid,
                first_ordinal=0,
            ).n_rows
    return n_rows


def seen(events: Iterable[StreamEvent]) -> list[object]:
    """What is compared: events with arrays in them have no equality of their own."""
    found: list[object] = []
    for event in events:
        if isinstance(event, (PlainBlock, TransactionBlock)):
            block = event.block
            assert block is not None
            found.append((block.payload.tobytes(), block.lengths.tolist(), block.relations))
            event = dataclasses.replace(event, block=None)  # type: ignore[arg-type]
        found.append(event)
    return found


@given(damaged(), st.booleans(), st.sampled_from((150, 700, 1 << 20)))
@settings(max_examples=300, deadline=None)
def test_the_compiled_loop_cuts_and_refuses_what_message_by_message_does(
    messages: list[bytes], parallel: bool, block_bytes: int
) -> None:
    """Block by block the same, up to the same message that is refused. (libpq drops empty messages.)"""
    messages = [message for message in messages if message]

    def attempt(fast: bool) -> tuple[list[object], type | None]:
        cutter = StreamCutter(block_bytes=block_bytes, pending_limit_bytes=4 * block_bytes, parallel=parallel)
        events: list[StreamEvent] = []
        try:
            if fast:
                for more in events_of(cutter, messages, block_bytes):
                    events += more
            else:
                for data in messages:
                    events += cutter.feed(data)
        except XidstreamError as error:
            return seen(events), type(error)
        return seen([*events, *cutter.flush(), *cutter.flush_open()]), None

    assert attempt(fast=True) == attempt(fast=False)


def test_the_stream_itself_is_read_whole() -> None:
    assert read(STREAM, parallel=False, block_bytes=1 << 20) == 3 + 8 + 1
    assert read(STREAM, parallel=False, block_bytes=100) == 3 + 8 + 1


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(), st.booleans(), st.sampled_from((100, 1 << 20)))
def test_a_damaged_stream_is_read_or_refused(messages: list[bytes], parallel: bool, block_bytes: int) -> None:
    tracemalloc.start()
    try:
        n_rows = read(messages, parallel=parallel, block_bytes=block_bytes)
    except XidstreamError:
        pass
    else:
        assert 0 <= n_rows <= len(messages)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < _MEMORY_LIMIT_BYTES
