"""What a lake's tables hold against what an unstreamed, never killed twin released: nothing lost, twice or disordered.

``judge`` counts rows by (table, ``_commit_lsn``, ``_seq``): *lost* are the twin's that a table lacks, *twice* those
that it has more than once, *alien* those that the twin never released; *disordered* are commits of a table whose new
rows are not all above those before. Where the rows are the same their values are compared, too, by the rule of
docs/delta.md for changed types. Transactions and messages are compared field by field.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.differential.compare import same_column
from tests.differential.local_pipeline import Sink
from tests.lakes import Lake
from xidstream.pipeline.log_tables.locations import MESSAGES, TRANSACTIONS

_KEYS = ("_commit_lsn", "_seq")


@dataclass
class Verdict:
    n_transactions: int = 0
    n_rows: int = 0
    n_messages: int = 0
    lost: int = 0
    twice: int = 0
    alien: int = 0
    disordered: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.lost or self.twice or self.alien or self.disordered or self.differences)

    def __str__(self) -> str:
        text = (
            f"{self.n_transactions} transactions, {self.n_rows} rows, {self.n_messages} messages: "
            f"{self.lost} lost, {self.twice} twice, {self.alien} alien, {self.disordered} out of order"
        )
        return text + "".join(f"\n    {d}" for d in self.differences[:5])


def judge(lake: Lake, twin: Sink, dropped: set[bytes]) -> Verdict:
    verdict = Verdict()
    wanted: dict[str, list[pa.Table]] = {}
    for transaction in twin.transactions:
        for relation, table in transaction.parts:
            wanted.setdefault(lake.name_of(relation.schema, relation.table), []).append(table)
    there = lake.tables()
    for name in sorted(there | set(wanted)):
        _judge_table(verdict, lake, name, wanted.get(name, []))
    _judge_transactions(verdict, lake, twin, dropped)
    _judge_messages(verdict, lake, twin, dropped)
    for name in [*there, TRANSACTIONS]:
        column = "commit_lsn" if name == TRANSACTIONS else "_commit_lsn"
        verdict.disordered += lake.n_disordered(name, column)
    return verdict


def _judge_table(verdict: Verdict, lake: Lake, name: str, wanted: list[pa.Table]) -> None:
    table = lake.rows(name)
    found = table if table is not None else pa.table({k: pa.array([], pa.int64()) for k in _KEYS})
    mine = Counter(zip(*(found[k].to_pylist() for k in _KEYS), strict=True))
    theirs = Counter(key for t in wanted for key in zip(*(t[k].to_pylist() for k in _KEYS), strict=True))
    lost, alien = theirs.keys() - mine.keys(), mine.keys() - theirs.keys()
    verdict.lost += len(lost)
    verdict.alien += len(alien)
    verdict.twice += sum(n - 1 for n in mine.values())
    verdict.n_rows += found.num_rows
    if lost or alien or table is None or max(mine.values(), default=1) > 1:
        if lost or alien:
            verdict.differences.append(f"{name}: lost {sorted(lost)[:3]}, alien {sorted(alien)[:3]}")
        return
    sources = lake.columns_of(name)
    found = found.append_column("place", pa.array(range(found.num_rows)))
    by_schema: dict[pa.Schema, list[pa.Table]] = {}
    for t in wanted:
        by_schema.setdefault(t.schema, []).append(t)
    for parts in by_schema.values():
        theirs_table = pa.concat_tables(parts)
        keys = theirs_table.select(_KEYS).append_column("n", pa.array(range(theirs_table.num_rows)))
        joined = keys.join(found.select([*_KEYS, "place"]), list(_KEYS)).sort_by("n")
        rows = found.take(joined["place"])
        for column in theirs_table.schema:
            candidates = sources.get(column.name.lower(), [])
            values = theirs_table[column.name]
            if not any(_agrees(rows[c], values, column.name) for c in candidates):
                verdict.differences.append(f"{name}.{column.name} ({column.type}) differs in {candidates}")


def _agrees(found: pa.ChunkedArray, wanted: pa.ChunkedArray, name: str) -> bool:
    if wanted.null_count == len(wanted):
        return found.null_count == len(found)
    if name in ("_text", "_unchanged"):
        return [_plain(x) for x in found.to_pylist()] == [_plain(x) for x in wanted.to_pylist()]
    try:
        return same_column(found, pc.cast(wanted, found.type))
    except pa.ArrowException:
        return False


def _plain(value: Any) -> Any:
    return None if value is None else [tuple(x) if isinstance(x, (tuple, list)) else x for x in value]


def _judge_transactions(verdict: Verdict, lake: Lake, twin: Sink, dropped: set[bytes]) -> None:
    rows = _of(lake, TRANSACTIONS).sort_by("commit_lsn").to_pylist()
    verdict.n_transactions = len(rows)
    counted = Counter(r["commit_lsn"] for r in rows)
    verdict.twice += sum(n - 1 for n in counted.values())
    theirs = {t.commit_lsn: t for t in twin.transactions}
    verdict.lost += len(theirs.keys() - counted.keys())
    gone = {m["commit_lsn"] for m in _of(lake, MESSAGES).to_pylist() if m["content"] in dropped}
    for row in rows:
        other = theirs.get(row["commit_lsn"])
        if other is None:
            # A stream delivers the messages of a rolled-back subtransaction; a transaction of nothing else is there.
            if row["rows"] or row["commit_lsn"] not in gone:
                verdict.alien += 1
                verdict.differences.append(f"the twin knows no transaction {row}")
            continue
        mine = tuple(row[n] for n in ("xid", "end_lsn", "commit_timestamp", "gid", "rows", "tables"))
        wanted = (other.xid, other.end_lsn, other.commit_timestamp, other.gid, other.n_rows, other.tables)
        if mine != wanted:
            verdict.differences.append(f"transaction {mine} is {wanted} in the twin")
        # A stream takes its origin from its first change; a logical message has none (differential.compare).
        if row["origin"] != other.origin and not (row["streamed"] and row["origin"] is None):
            verdict.differences.append(f"transaction {row}: origin is {other.origin} in the twin")


def _judge_messages(verdict: Verdict, lake: Lake, twin: Sink, dropped: set[bytes]) -> None:
    rows = _of(lake, MESSAGES).sort_by("lsn").to_pylist()
    verdict.n_messages = len(rows)
    verdict.twice += sum(n - 1 for n in Counter(r["lsn"] for r in rows).values())
    mine = {r["lsn"]: tuple(r.values()) for r in rows if r["content"] not in dropped}
    theirs = {
        m.lsn: (m.commit_lsn, m.lsn, m.xid, m.transactional, m.prefix, m.content) for m in twin.messages
    }
    verdict.lost += len(theirs.keys() - mine.keys())
    verdict.alien += len(mine.keys() - theirs.keys())
    verdict.differences += [
        f"message {lsn}: {str(mine[lsn])[:80]} and {str(theirs[lsn])[:80]}"
        for lsn in mine.keys() & theirs.keys()
        if mine[lsn] != theirs[lsn]
    ]


def _of(lake: Lake, name: str) -> pa.Table:
    rows = lake.rows(name)
    assert rows is not None, f"{name} is not there"
    return rows
