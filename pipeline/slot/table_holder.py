"""Scratch: replaced by the helper's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.slot.snapshot_sources import survey
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import PublishedSource


@dataclass(frozen=True)
class Held:
    snapshot_name: str
    bounds: SnapshotBounds
    source: PublishedSource
    by_range: bool


class TableHolder:
    def __init__(self, dsn: str, publications: Any) -> None:
        self._dsn, self._publications = dsn, publications
        self._held: dict[int, Any] = {}

    def hold(self, source: PublishedSource, *, wait_for_writers: bool) -> Held:
        c = psycopg.connect(self._dsn, autocommit=True)
        self._held[source.relation.relid] = c
        c.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        c.execute(
            sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(
                sql.Identifier(source.relation.schema, source.relation.table)
            )
        )
        with psycopg.connect(self._dsn, autocommit=True) as d:
            (b,) = d.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            (now,) = (s for s in survey(d, self._publications) if s.relation.relid == source.relation.relid)
        snap, name, e, us = c.execute(
            "SELECT pg_current_snapshot()::text, pg_export_snapshot(), pg_current_wal_insert_lsn()::text,"
            " (extract(epoch from clock_timestamp()) * 1000000)::int8"
        ).fetchone()
        xmin, xmax, xip = snap.split(":")
        xips = tuple(int(x) for x in xip.split(",") if x)
        b, e = Lsn.parse(b), Lsn.parse(e)
        return Held(name, SnapshotBounds(b.before, e, int(xmin), int(xmax), xips, us), now, True)

    def release(self, relid: int) -> None:
        c = self._held.pop(relid, None)
        if c is not None:
            c.close()

    def await_flushed(self, lsn: Lsn) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as d:
            while True:
                (f,) = d.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
                if Lsn.parse(f) + 40 >= lsn:
                    return
                time.sleep(0.05)

    def room_for(self, wanted: int) -> int:
        return wanted

    def waiting_for(self) -> Any:
        return None
