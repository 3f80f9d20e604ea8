"""The grammar's rules for whole messages, as tests have them."""

from __future__ import annotations

from tests.pgoutput.messages import Message
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.pgoutput.grammar import Grammar, StreamState
from xidstream.pipeline.pgoutput.messages import LogicalMessage, StreamAbort, StreamStart
from xidstream.pipeline.stream.ledger import TransactionLedger

_STAYING = b"IUDTRYM"


def step(grammar: Grammar, message: Message, lsn: Lsn = INVALID_LSN) -> StreamState:
    """Take any message as the cutter takes it. Raises IllegalTransition, and then nothing has changed."""
    if message.type in _STAYING:
        # Their xid is the subtransaction's, which no rule is about.
        transactional = message.transactional if isinstance(message, LogicalMessage) else None
        grammar.check(message.type, transactional=transactional, lsn=lsn)
        return grammar.state
    first = message.first_segment if isinstance(message, StreamStart) else None
    subxid = message.subxid if isinstance(message, StreamAbort) else None
    xid = getattr(message, "xid", None)
    return grammar.on_control(message.type, xid, first=first, subxid=subxid, lsn=lsn)


def new_grammar() -> Grammar:
    """With a ledger of its own, in which no stream is open."""
    return Grammar(TransactionLedger())


def open_streams(grammar: Grammar) -> dict[Xid, Lsn | None]:
    """Each open stream by its top-level xid, with the LSN at which it started."""
    ledger = grammar._streams
    assert isinstance(ledger, TransactionLedger)
    return {record.xid: record.stream_lsn for record in ledger.streams}
