"""The relations that a block's rows name, against the parser's reading of each message."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.pgoutput import writer
from tests.pgoutput.messages import Delete, Insert, Truncate, Update
from tests.pgoutput.parser import parse_message
from tests.wire import Wire, text_tuple
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.message_buffer import HEADER_BYTES
from xidstream.pipeline.pgoutput.messages import LogicalMessage
from xidstream.pipeline.pgoutput.relids import relids_of


def named(message: object) -> list[int]:
    if isinstance(message, (Insert, Update, Delete)):
        return [message.relid]
    return list(message.relids) if isinstance(message, Truncate) else []


def arrays(messages: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    payload = np.frombuffer(b"".join(messages), np.uint8)
    return payload, np.array([len(m) for m in messages], np.int32)


@pytest.mark.parametrize("streamed", [False, True])
def test_each_relation_that_a_row_or_a_truncate_names_is_found_and_no_other(streamed: bool) -> None:
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed)
    xid = Xid(700) if streamed else None
    for _ in range(300):
        wire = Wire()
        pool = [chosen.randrange(1, 1 << 32) for _ in range(chosen.randrange(1, 6))]
        for _ in range(chosen.randrange(40)):
            relid, values = chosen.choice(pool), text_tuple("x" * chosen.randrange(20), None)
            wire.add(
                chosen.choice(
                    [
                        Insert(xid, relid, values),
                        Update(xid, relid, None, None, values),
                        Delete(xid, relid, None, values),
                        Truncate(
                            xid, False, False, tuple(chosen.sample(pool, chosen.randrange(1, len(pool) + 1)))
                        ),
                        LogicalMessage(xid, True, Lsn(5), "p", b"content"),
                    ]
                )
            )
            if not streamed and chosen.random() < 0.3:
                wire.begin(700, 0x5000)
                wire.commit(0x5000)
        messages = wire.take()
        parsed = [parse_message(m, in_stream=streamed, lsn=Lsn(0), offset=HEADER_BYTES) for m in messages]
        expected = sorted({relid for message in parsed for relid in named(message)})
        assert relids_of(*arrays(messages), streamed=streamed) == expected, f"seed {seed}"


def test_damaged_messages_are_passed_over_for_the_decoder_to_refuse() -> None:
    whole = writer.xlog_data(Lsn(1), writer.write(Insert(None, 7, text_tuple("a"))))
    truncate = writer.xlog_data(Lsn(1), writer.write(Truncate(None, False, False, (8, 9))))
    damaged = truncate[: HEADER_BYTES + 1] + b"\xff\xff\xff\xff" + truncate[HEADER_BYTES + 5 :]
    for messages in ([b"w"], [whole[: HEADER_BYTES + 3]], [damaged], [whole[:HEADER_BYTES]], []):
        assert relids_of(*arrays(messages), streamed=False) == []
    assert relids_of(*arrays([damaged, whole, b"w"]), streamed=False) == [7]
