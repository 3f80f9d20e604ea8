"""The largest values: what a server can send comes as it is, and what it cannot send ends the run with its place."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest

from tests.differential.local_pipeline import LocalPipeline, Message, Options, Released, Sink
from tests.postgres_fixtures import VERSIONS, Database
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot

pytestmark = [pytest.mark.postgres, pytest.mark.nightly, pytest.mark.timeout(900)]
NEWEST = pytest.mark.parametrize("postgres_server", VERSIONS[-1:], indirect=True, ids=lambda v: f"pg{v}")

LARGEST = 1_000_000_000
"""A text and a message. The exact limits are the server's: 1 GiB for an allocation, which has headers in it where a row
is stored, decoded and sent, and 1,020 MiB for a WAL record (XLogRecordMaxSize), which a logical message is."""


class Lengths(Sink):
    """Keeps the sizes and the ends of values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, bytes]] = []
        self.messages_seen: list[tuple[int, bytes]] = []

    def take(self, transactions: list[Released], messages: list[Message]) -> None:
        for transaction in transactions:
            for _, table in transaction.parts:
                for seq, value in zip(table.column("_seq"), table.column("v"), strict=True):
                    self.seen.append(
                        (seq.as_py(), pc.binary_length(value).as_py(), bytes(value.as_buffer()[:1]))
                    )
            transaction.parts.clear()
            transaction.messages.clear()
        self.messages_seen += [(len(m.content), m.content[:1]) for m in messages]


def slot_of(database: Database) -> str:
    return f"s_{database.name}"


def read(database: Database, folder: Path, sink: Sink, **options: object) -> None:
    target = Lsn.parse(database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])
    made = Options(block_bytes=4 << 20, pending_limit_bytes=64 << 20, buffer_memory_bytes=64 << 20, **options)  # type: ignore[arg-type]
    with LocalPipeline(database.dsn(), slot_of(database), ("p",), folder, sink, made) as pipeline:
        pipeline.read_until(target, timeout_s=600)


def set_up(database: Database) -> None:
    database.execute("CREATE TABLE t (v text)")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("CREATE TABLE b (v bytea)")
    database.execute("ALTER TABLE b ALTER v SET STORAGE EXTERNAL")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    create_slot(database.dsn(), slot_of(database), two_phase=False, failover=False)


@NEWEST
@pytest.mark.parametrize("streaming", ["on", "off"])
def test_the_largest_text_and_message_that_a_server_can_send_come_whole(
    database: Database, tmp_path: Path, streaming: str
) -> None:
    set_up(database)
    database.execute("BEGIN")
    database.execute(f"INSERT INTO t SELECT repeat('x', {LARGEST})")
    database.execute(f"SELECT pg_logical_emit_message(true, 'p', repeat('m', {LARGEST}))")
    database.execute("INSERT INTO t VALUES ('small')")
    database.execute("COMMIT")
    sink = Lengths()
    read(database, tmp_path, sink, streaming=streaming)
    assert sorted(sink.seen) == [(0, LARGEST, b"x"), (1, 5, b"s")]
    assert sink.messages_seen == [(LARGEST, b"m")]


@NEWEST
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t SELECT repeat('x', (1 << 30) - 256)",
        "INSERT INTO b SELECT decode(repeat('00', 300000000), 'hex') || decode(repeat('00', 300000000), 'hex')",
    ],
    ids=["text", "bytea"],
)
def test_a_row_that_the_server_cannot_send_ends_the_run_and_names_its_lsn(
    database: Database, tmp_path: Path, statement: str
) -> None:
    set_up(database)
    database.execute(statement)
    with pytest.raises(PoisonedChange, match=r"the change at LSN .* has more bytes than the server can send"):
        read(database, tmp_path, Lengths())
