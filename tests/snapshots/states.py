"""The states that a change log folds to, at every LSN at once, by DuckDB: for tables of millions of rows.

A state is told by two numbers: how many rows it has, and the sum of their hashes. Each event of a log (a row of the
snapshot, or a change) adds to both: a delete takes away the hash of the row that its key had, an update puts one hash
in another's place, a truncate begins anew. So running sums are the state after each commit. It follows the contract
as ``tests.fold`` does, which is the plain form of it, and with which a test compares it.

A hash is of PostgreSQL's text of the columns, or of DuckDB's where the value has a native type: both logs that are
compared have it the same way, and ``source_state`` has the same for columns whose text does not differ. Values that the
server did not send are put in first: those of the row that the key had before, or that the old key had.

What no fold can make sense of (a key that is inserted twice, a row that is changed and not there) is an ``oddity``.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from tests.postgres_fixtures import Database
from tests.snapshots.tables import SCHEMA, Table, quoted

State = tuple[int, int]
"""Rows, and the sum of their hashes."""

_MEMORY = "1500MB"
_PAIRS = pa.schema([("xid", pa.int64()), ("lsn", pa.int64())])
_MASK = (1 << 56) - 1
"""A hash is the bytes 8 to 14 of the text's MD5, the first one least."""
_MOST_CHAIN = 10_000


@dataclass(frozen=True)
class States:
    """``before``: of the snapshot. ``lsns``, ``after``: of each commit after it."""

    before: State
    lsns: tuple[int, ...]
    after: tuple[State, ...]
    n_events: int
    oddities: tuple[str, ...]

    def at(self, lsn: int) -> State:
        place = bisect.bisect_right(self.lsns, lsn)
        return self.after[place - 1] if place else self.before


def states(
    files: Sequence[str],
    columns: Sequence[str],
    key: Sequence[str] | None,
    *,
    place: int | None = None,
    contained: Iterable[tuple[int, int]] = (),
    hashed: Sequence[str] | None = None,
) -> States:
    """Of one table's log in Parquet files. ``place``: of the snapshot whose rows count; ``contained``: (_xid,
    _commit_lsn) of the transactions that it contains. ``hashed``: the columns that are compared, all by default."""
    if not files:
        return States((0, 0), (), (), 0, ())
    with tempfile.TemporaryDirectory(prefix="xs-duckdb-") as spilled, duckdb.connect() as db:
        db.execute(f"SET memory_limit = '{_MEMORY}'; SET threads = 2; SET preserve_insertion_order = false")
        db.execute(f"SET temp_directory = '{spilled}'")
        values = [f"coalesce(_text[{_literal(c)}], CAST({quoted(c)} AS VARCHAR))" for c in columns]
        pieces = " || ".join(_piece(values[columns.index(c)]) for c in key) if key else "''"
        compared = [i for i, column in enumerate(columns) if hashed is None or column in hashed]
        about = (files, pieces, place, contained)
        chains: list[str] = []
        if incomplete := _incomplete(db, files):
            named = [f"{value} AS v{i}" for i, value in enumerate(values)]
            lacking = [f"coalesce(list_contains(_unchanged, {_literal(c)}), false)" for c in columns]
            _events(db, *about, [*named, *(f"{text} AS u{i}" for i, text in enumerate(lacking))])
            chains = _fill_in(db, columns, [i for i, column in enumerate(columns) if column in incomplete])
            total = _hash([f"v{i}" for i in compared])
            db.execute(
                f"CREATE TABLE hashed AS SELECT ord, lsn, kind, key, epoch, {total} AS h FROM event;"
                " DROP TABLE event"
            )
        else:
            _events(db, *about, [f"{_hash([values[i] for i in compared])} AS h"])
            db.execute("ALTER TABLE event RENAME TO hashed")
        _contributions(db, keyed=key is not None)
        rows = db.execute(
            "SELECT lsn, arg_max(n, ord), arg_max(h, ord), bool_or(kind = 'snapshot') FROM running"
            " GROUP BY lsn, kind = 'snapshot' ORDER BY max(ord)"
        ).fetchall()
        (n_events,) = db.execute("SELECT count(*) FROM running").fetchone() or (0,)
        oddities = [*chains, *(str(text) for (text,) in db.execute("SELECT * FROM oddity").fetchall())]
    before = [(int(n), int(h)) for _, n, h, is_snapshot in rows if is_snapshot]
    after = [(int(lsn), (int(n), int(h))) for lsn, n, h, is_snapshot in rows if not is_snapshot]
    return States(
        before[0] if before else (0, 0),
        tuple(lsn for lsn, _ in after),
        tuple(state for _, state in after),
        int(n_events),
        tuple(oddities),
    )


def transactions_of(files: Sequence[str]) -> list[tuple[int, int]]:
    """(_xid, _commit_lsn) of all changes in a log's files."""
    with duckdb.connect() as db:
        query = "SELECT DISTINCT _xid, _commit_lsn FROM read_parquet(?) WHERE _xid IS NOT NULL"
        return [(int(xid), int(lsn)) for xid, lsn in db.execute(query, [list(files)]).fetchall()]


def _piece(text: str) -> str:
    return f"coalesce({text}, '\\N') || chr(31)"


def _hash(texts: Sequence[str]) -> str:
    return f"(md5_number_lower({' || '.join(map(_piece, texts))}) & {_MASK})::HUGEINT"


def _incomplete(db: duckdb.DuckDBPyConnection, files: Sequence[str]) -> set[str]:
    """The columns of which some value was not sent."""
    query = "SELECT DISTINCT unnest(_unchanged) FROM read_parquet(?) WHERE _change_type = 'update_postimage'"
    return {str(name) for (name,) in db.execute(query, [list(files)]).fetchall()}


def _events(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[str],
    key: str,
    place: int | None,
    contained: Iterable[tuple[int, int]],
    expressions: Sequence[str],
) -> None:
    """Table event: what counts, numbered in the fold's order, with its key and ``expressions``."""
    pairs = list(contained)
    db.register(
        "contained", pa.table({"xid": [xid for xid, _ in pairs], "lsn": [lsn for _, lsn in pairs]}, _PAIRS)
    )
    db.execute(
        f"""CREATE TABLE event AS
        SELECT *, CAST(sum(CAST(kind = 'truncate' AS INT)) OVER (ORDER BY ord) AS BIGINT) AS epoch FROM (
          SELECT row_number() OVER (ORDER BY _change_type <> 'snapshot', _commit_lsn, _seq) AS ord,
                 _commit_lsn AS lsn, _change_type AS kind,
                 CASE WHEN _change_type <> 'truncate' THEN {key} END AS key, {", ".join(expressions)}
          FROM read_parquet($files, union_by_name = true) r
          WHERE CASE WHEN _change_type = 'snapshot' THEN _commit_lsn = $place
                ELSE NOT EXISTS (SELECT 1 FROM contained c WHERE c.xid = r._xid AND c.lsn = r._commit_lsn) END)""",
        {"files": list(files), "place": -1 if place is None else place},
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _fill_in(db: duckdb.DuckDBPyConnection, columns: Sequence[str], incomplete: Sequence[int]) -> list[str]:
    """Put the values in that were not sent. Returns what has no earlier row to take them from."""
    # A postimage directly after a preimage goes on with the row of the preimage's key.
    db.execute(
        """CREATE TABLE earlier AS SELECT ord, CASE WHEN after_preimage THEN lag(own) OVER (ORDER BY ord) ELSE own END
               AS from_ord FROM (
             SELECT ord, lag(ord) OVER (PARTITION BY epoch, key ORDER BY ord) AS own,
                    lag(kind) OVER (ORDER BY ord) = 'update_preimage' AND kind = 'update_postimage' AS after_preimage
             FROM event)"""
    )
    left = []
    for i in incomplete:
        for _ in range(_MOST_CHAIN):
            changed = db.execute(
                f"""UPDATE event SET v{i} = f.v{i}, u{i} = false FROM earlier e, event f
                    WHERE event.kind = 'update_postimage' AND event.u{i} AND e.ord = event.ord
                      AND f.ord = e.from_ord AND NOT f.u{i}"""
            ).fetchone()
            if not changed or not changed[0]:
                break
        (n_left,) = db.execute(
            f"SELECT count(*) FROM event WHERE kind = 'update_postimage' AND u{i}"
        ).fetchone() or (0,)
        if n_left:
            left.append(f"{n_left} unchanged values of {columns[i]} have no earlier row")
    return left


def _contributions(db: duckdb.DuckDBPyConnection, *, keyed: bool) -> None:
    """Table running: the sums after each event; table oddity."""
    db.execute(
        """CREATE TABLE step AS SELECT ord, lsn, kind, epoch, h,
               coalesce(lag(kind) OVER k NOT IN ('delete', 'update_preimage'), false) AS was_there,
               coalesce(lag(h) OVER k, 0) AS old_h,
               coalesce(lag(kind) OVER (ORDER BY ord) = 'update_preimage', false) AS after_preimage
           FROM hashed WINDOW k AS (PARTITION BY epoch, key ORDER BY ord)"""
    )
    db.execute("DROP TABLE hashed; CREATE TABLE oddity (what VARCHAR)")
    new = "kind IN ('insert', 'snapshot') OR (kind = 'update_postimage' AND after_preimage)"
    gone = "kind IN ('delete', 'update_preimage')"
    if keyed:
        n = f"CASE WHEN {new} THEN 1 WHEN {gone} THEN -1 ELSE 0 END"
        h = f"CASE WHEN {new} THEN h WHEN {gone} THEN -old_h WHEN kind = 'update_postimage' THEN h - old_h ELSE 0 END"
        odd = f"CASE WHEN kind = 'truncate' THEN false WHEN {new} THEN was_there ELSE NOT was_there END"
        db.execute(
            "INSERT INTO oddity SELECT count(*) || ' × ' || kind || ' of a key that is ' ||"
            f" CASE WHEN bool_or(was_there) THEN '' ELSE 'not ' END || 'there' FROM step WHERE {odd} GROUP BY kind"
        )
    else:
        n = f"CASE WHEN kind = 'truncate' THEN 0 WHEN {gone} THEN -1 ELSE 1 END"
        h = f"CASE WHEN kind = 'truncate' THEN 0 WHEN {gone} THEN -h ELSE h END"
    db.execute(
        f"""CREATE TABLE running AS SELECT ord, lsn, kind, sum({n}) OVER e AS n, sum({h}) OVER e AS h FROM step
            WINDOW e AS (PARTITION BY epoch ORDER BY ord)"""
    )
    if not keyed:
        db.execute(
            "INSERT INTO oddity SELECT 'fewer rows than none, ' || count(*) || ' times' FROM running WHERE n < 0"
            " HAVING count(*) > 0"
        )


def source_state(database: Database, table: Table, columns: Sequence[str]) -> State:
    """What the source holds now, in ``columns``: their text must be DuckDB's, too."""
    # A cast to text takes the padding off, which the stream keeps.
    pieces = " || ".join(
        f"CASE WHEN {c} IS NULL THEN '\\N' WHEN pg_typeof({c}) = 'character'::regtype THEN format('%s', {c})"
        f" ELSE {c}::text END || chr(31)"
        for c in map(quoted, columns)
    )
    number = " + ".join(f"(get_byte(d, {8 + i})::bigint << {8 * i})" for i in range(7))
    ((n, h),) = database.execute(
        f"SELECT count(*), coalesce(sum({number}), 0) FROM"
        f" (SELECT decode(md5({pieces}), 'hex') AS d FROM {SCHEMA}.{quoted(table.name)}) x"
    )
    return int(n), int(h)
