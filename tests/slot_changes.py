"""What a slot has, asked by SQL: whole transactions in commit order, without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

from tests.pgoutput.messages import Delete, Insert, Truncate, TupleData, Update
from tests.pgoutput.parser import parse_message
from tests.postgres_fixtures import Database
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.pgoutput.messages import Begin, Relation, Type
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.stream.relation_book import RelationBook

Change = Insert | Update | Delete | Truncate


@dataclass
class Transaction:
    xid: Xid
    commit_lsn: Lsn
    changes: list[Change] = field(default_factory=list)

    @property
    def inserted(self) -> list[str | None]:
        """The first column of each row that it inserted."""
        return [texts(change.new)[0] for change in self.changes if isinstance(change, Insert)]

    def inserted_into(self, relid: int) -> list[str | None]:
        """Of one table."""
        return [
            texts(change.new)[0]
            for change in self.changes
            if isinstance(change, Insert) and change.relid == relid
        ]


@dataclass
class SlotChanges:
    """``relations``: by relid, what the server said last of each relation of which a row came."""

    transactions: list[Transaction]
    relations: dict[int, RelationVersion]


def make_slot(database: Database) -> str:
    name = f"s_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
    return name


def slot_changes(
    database: Database, publications: str = "p", column_names: ColumnNames = MappingProxyType({})
) -> SlotChanges:
    """All that the slot of ``make_slot`` has, and had not given before."""
    # So that a commit that has just returned is flushed: the function reads no further.
    database.execute("SELECT pg_create_restore_point('flush'), txid_current()")
    rows = database.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', %s)",
        f"s_{database.name}",
        publications,
    )
    book, sent = RelationBook(column_names=column_names), set()
    found = SlotChanges([], {})
    for (data,) in rows:
        message = parse_message(data, in_stream=False, lsn=INVALID_LSN)
        if isinstance(message, Begin):
            found.transactions.append(Transaction(message.xid, message.final_lsn))
        elif isinstance(message, Type):
            book.add_type(None, message)
        elif isinstance(message, Relation):
            book.declare(None, message, bytes(data)[1:])
        elif isinstance(message, (Insert, Update, Delete)):
            found.transactions[-1].changes.append(message)
            sent.add(message.relid)
        elif isinstance(message, Truncate):
            found.transactions[-1].changes.append(message)
    found.relations = {version.relid: version for version in book.used(None, sent).relations.values()}
    return found


def texts(row: TupleData) -> tuple[str | None, ...]:
    return tuple(None if column.value is None else column.value.decode() for column in row.columns)
