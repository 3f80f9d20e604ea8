"""Two sinks that must hold the same, and one sink that must explain the source tables.

``difference`` compares transactions in order, then rows by table and layout (types included), then messages;
it returns the first difference in words, or None. Floats are compared by their bits, so that NaN equals NaN
and -0.0 does not equal 0.0.

``check_confirmations`` holds each confirmed position against what was in the sink at that time. ``Model``
applies released changes as a consumer would, and ``final_difference`` compares it with the tables: an oracle
that shares no code with either stream.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from tests.differential.local_pipeline import Message, Released, Sink
from tests.differential.source_schema import IDENTITY
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS

_PLAIN_FIELDS = ("xid", "commit_lsn", "end_lsn", "commit_timestamp", "n_rows", "tables", "gid", "origin")


def difference(
    streamed: Sink,
    twin: Sink,
    *,
    dropped: frozenset[bytes] | set[bytes] = frozenset(),
    without_origin: frozenset[int] | set[int] = frozenset(),
    ignore: Sequence[str] = (),
    parked: frozenset[str] = frozenset(),
) -> str | None:
    """What is not the same, in words; None when all is. ``parked``: tables of which rows may be left out.

    Two things that the server does otherwise in a stream are excepted, exactly: ``dropped``, the contents of
    messages that a stream delivers though they were rolled back (fact 10); ``without_origin``, the xids of
    streams for which it sent no O (it takes the origin from the first change, and a logical message has none).
    """
    if rolled_back := [m for m in twin.messages if m.content in dropped]:
        return f"the twin delivered a rolled-back message: {rolled_back[0]}"
    ours = [without(t, dropped) for t in streamed.transactions]
    ours = [t for t in ours if t.n_rows or t.messages]
    fields = [f for f in _PLAIN_FIELDS if f not in ignore]
    for place, (a, b) in enumerate(zip(ours, twin.transactions, strict=False)):
        for name in fields:
            if name == "origin" and a.origin is None and a.streamed and a.xid in without_origin:
                continue
            if getattr(a, name) != getattr(b, name):
                return (
                    f"transaction {place}: {name} differs: {getattr(a, name)!r} streamed, {getattr(b, name)!r} "
                    f"in the twin\n  streamed {a}\n  twin     {b}"
                )
        if found := rows_difference(a, b, has_gaps=not parked.isdisjoint(a.tables)):
            return f"transaction {place} (xid {a.xid}, streamed {a.streamed}, {a.n_rows} rows): {found}"
        if a.messages != b.messages:
            return f"transaction {place} (xid {a.xid}): messages {short(a.messages)} and {short(b.messages)}"
    if len(ours) != len(twin.transactions):
        longer = ours if len(ours) > len(twin.transactions) else twin.transactions
        extra = longer[min(len(ours), len(twin.transactions))]
        return f"{len(ours)} transactions streamed, {len(twin.transactions)} in the twin; the first extra one: {extra}"
    mine = [m for m in streamed.messages if m.content not in dropped]
    # A transactional message takes its transaction's place in both; other ones come when they were written,
    # which is another place among the commits, but the same order among themselves.
    for transactional in (True, False):
        x = [m for m in mine if m.transactional is transactional]
        y = [m for m in twin.messages if m.transactional is transactional]
        if x != y:
            return f"messages (transactional: {transactional}): {short(x)} streamed, {short(y)} in the twin"
    return None


def without(transaction: Released, dropped: frozenset[bytes] | set[bytes]) -> Released:
    if not any(m.content in dropped for m in transaction.messages):
        return transaction
    kept = [m for m in transaction.messages if m.content not in dropped]
    fields = {f: getattr(transaction, f) for f in transaction.__dataclass_fields__}
    return Released(**{**fields, "messages": kept})


def rows_difference(a: Released, b: Released, *, has_gaps: bool = False) -> str | None:
    left, right = a.by_layout(), b.by_layout()
    if left.keys() != right.keys():
        only = [f"{name}: {schema.names} {schema.types}" for name, schema in left.keys() ^ right.keys()]
        return f"layouts differ: {only}"
    for key, table in left.items():
        if same(table, right[key]):
            continue
        for x, y in zip(table.to_pylist(), right[key].to_pylist(), strict=False):
            if repr(x) != repr(y):
                names = [n for n in x if repr(x[n]) != repr(y[n])]
                shown = {n: (shorten(x[n]), shorten(y[n])) for n in names}
                return f"{key[0]}, row _seq {x['_seq']} and {y['_seq']}: (streamed, twin) {shown}"
        return f"{key[0]}: {table.num_rows} and {right[key].num_rows} rows"
    seqs = sorted(s for table in left.values() for s in table["_seq"].to_pylist())
    if has_gaps and len(set(seqs)) == len(seqs) and set(seqs) <= set(range(a.n_rows)):
        return None
    if seqs != list(range(a.n_rows)):
        return (
            f"_seq is not dense: {a.n_rows} rows, {len(set(seqs))} numbers up to {seqs[-1] if seqs else None}"
        )
    return None


def same(a: pa.Table, b: pa.Table) -> bool:
    return a.num_rows == b.num_rows and all(
        same_column(x.combine_chunks(), y.combine_chunks()) for x, y in zip(a.columns, b.columns, strict=True)
    )


def same_column(a: Any, b: Any) -> bool:
    if isinstance(a, pa.ChunkedArray):
        a = pa.concat_arrays(a.chunks) if a.num_chunks else pa.array([], a.type)
        b = pa.concat_arrays(b.chunks) if b.num_chunks else pa.array([], b.type)
    if pa.types.is_floating(a.type):
        bits = pa.int64() if a.type == pa.float64() else pa.int32()
        # What lies under a null is nobody's business.
        a, b = (pc.if_else(x.is_valid(), x.view(bits), pa.scalar(None, bits)) for x in (a, b))
    elif pa.types.is_list(a.type) and pa.types.is_floating(a.type.value_type):
        return pc.list_value_length(a).equals(pc.list_value_length(b)) and same_column(
            a.flatten(), b.flatten()
        )
    return bool(a.equals(b))


def check_confirmations(sink: Sink, *, up_to: int) -> str | None:
    """No position was confirmed before all at or below it was in the sink or in the journal, and none went back."""
    before = 0
    for confirmed, n_transactions, n_messages, journaled in sink.confirmations:
        if confirmed < before:
            return f"confirmed {confirmed} after {before}"
        before = confirmed
        late = [
            t
            for t in sink.transactions[n_transactions:]
            if t.end_lsn <= confirmed and not journaled.has(t.commit_lsn, t.end_lsn)
        ]
        if late:
            return f"{confirmed} was confirmed before the sink held {late[0]}"
        late_messages = [
            m
            for m in sink.messages[n_messages:]
            if not m.transactional and m.lsn < confirmed and m.lsn not in journaled.messages
        ]
        if late_messages:
            return f"{confirmed} was confirmed before the sink held {late_messages[0]}"
    if before < up_to:
        return f"only {before} was confirmed in the end, not {up_to}"
    return None


def short(messages: Sequence[Message]) -> str:
    shown = [f"{m.content[:24]!r}@{m.lsn:X}" for m in messages]
    return f"[{', '.join(shown[:6])}{', …' if len(shown) > 6 else ''}] ({len(shown)})"


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}… ({len(text)})"


# -- the source tables as oracle -----------------------------------------------------------------------


class Model:
    """Rows by relid and identity, built from released rows. ``unknown`` values are absent from a row."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[Any, dict[str, str | None]]] = {}
        self.problems: list[str] = []

    def apply(self, transactions: Iterable[Released]) -> None:
        for transaction in transactions:
            pending: dict[str, str | None] | None = None
            for row in transaction.rows():
                pending = self._apply(row, pending)

    def _apply(self, row: dict[str, Any], old: dict[str, str | None] | None) -> dict[str, str | None] | None:
        """``old`` is the row that the preimage just before took out; returns that of this one."""
        kind = row["_change_type"]
        table = self.tables.setdefault(row["relid"], {})
        if kind == "truncate":
            table.clear()
            return None
        values = values_of(row)
        identity = IDENTITY.get(row["table"], "id")
        unchanged = row["_unchanged"] or ()
        if kind in ("update_preimage", "delete"):
            known = {n: values[n] for n in row["keys"] or values if n not in unchanged}
            old = self._take(row["table"], kind, table, identity, known)
            return old if kind == "update_preimage" else None
        if kind == "update_postimage" and old is None:
            old = self._take(row["table"], kind, table, identity, {n: values[n] for n in row["keys"]})
        for name in unchanged:
            values.pop(name)
            if old is not None and name in old:
                values[name] = old[name]
        if values[identity] in table:
            self.problems.append(f"{row['table']}: {kind} makes {shorten(values[identity])} twice")
        table[values[identity]] = values
        return None

    def _take(
        self, name: str, kind: str, table: dict[Any, Any], identity: str, known: dict[str, str | None]
    ) -> dict[str, str | None] | None:
        """Remove the one row that has the ``known`` values. Columns that a row never heard of agree with any."""
        key = known.get(identity)
        candidates = [key] if key in table else [] if key is not None else list(table)
        found = [k for k in candidates if all(table[k].get(n, v) == v for n, v in known.items())]
        if len(found) == 1:
            return table.pop(found[0])  # type: ignore[no-any-return]
        self.problems.append(f"{name}: {kind} finds {len(found)} rows of {shorten(known)}")
        return None


def values_of(row: dict[str, Any]) -> dict[str, str | None]:
    """PostgreSQL's text of each of the table's columns, None for NULL."""
    text = dict(row["_text"] or ())
    out: dict[str, str | None] = {}
    for name, value in row.items():
        if name in ("table", "relid", "keys") or name in CONTRACT_COLUMNS:
            continue
        out[name] = text[name] if name in text else as_text(value)
    return out


def as_text(value: Any) -> str | None:
    """A value of the simple types as PostgreSQL prints it; lists in a form of their own (see ``_source``)."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else repr(value)
    if isinstance(value, datetime.datetime):
        text = value.replace(tzinfo=None).isoformat(" ")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return f"{text}+00" if value.tzinfo else text
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value)


_COMPARED = ("int2", "int4", "int8", "text", "numeric", "bytea", "timestamptz", "bool", "varchar")


def final_difference(model: Model, connection: psycopg.Connection[Any]) -> str | None:
    """The first table whose rows are not those of the model. Columns that a row's change never told are skipped."""
    connection.execute("SET timezone = 'UTC'")
    if model.problems:
        return f"{len(model.problems)} changes did not apply: {model.problems[0]}"
    tables = connection.execute(
        """SELECT c.oid::int8, n.nspname, c.relname,
                  array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE t.typname = ANY (%s)
                     AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000))
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
           JOIN pg_type t ON t.oid = a.atttypid
           WHERE n.nspname IN ('s', 's2', 's3', 'f', 'r') AND c.relkind IN ('r', 'p')
           GROUP BY 1, 2, 3 ORDER BY 2, 3""",
        (list(_COMPARED),),
    ).fetchall()
    for relid, schema, name, columns in tables:
        if name in ("leafy", "low", "high", "log") and not (schema == "s" and name.startswith("leafy_")):
            continue  # published as something else, or without identity
        full_name = f"{schema}.{name}"
        if name == "listed":
            columns = ["id", "note"]
        where = sql.SQL("WHERE k > 50" if name == "filtered" else "")
        wanted = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(c)) for c in columns)
        query = sql.SQL("SELECT {} FROM {} {}").format(wanted, sql.Identifier(schema, name), where)
        place = columns.index(IDENTITY.get(full_name, "id"))
        source = {row[place]: dict(zip(columns, row, strict=True)) for row in connection.execute(query)}
        mine = model.tables.get(relid, {})
        if source.keys() != mine.keys():
            odd = sorted(source.keys() ^ mine.keys(), key=str)
            return f"{full_name}: {len(source)} rows in the table, {len(mine)} in the model, e.g. {odd[:3]}"
        for key, row in source.items():
            for column, value in row.items():
                if column in mine[key] and mine[key][column] != value:
                    shown = f"{shorten(value)} in the table, {shorten(mine[key][column])} in the model"
                    return f"{full_name} {shorten(key)}.{column}: {shown}"
    return None
