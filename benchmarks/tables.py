"""Many tables: what a relation costs the reader and a buffer, in memory and in CPU, however many were seen before.

``live``: a row for each of many tables, each in a transaction of its own, and then again, when all tables are known.
``dropped``: tables that are made, get one row, and are dropped: the server says nothing of the drop.

Growth is of private memory, from the first row read to the last; CPU seconds are all of the drain. The sink takes the
batches and leaves them, because what Spark costs per table is not what is looked for here.
``in_process``: see ``benchmarks.relations``.
"""

from __future__ import annotations

from typing import Any

from benchmarks import ours, relations
from benchmarks.ours import Drained
from benchmarks.source import COLUMNS, PUBLICATION, Source, server

_TABLES_PER_COMMIT = 200
_ROW = "values (1, 1, 'a note', 1.5, now(), 0.5, true)"
_BUFFERS = {"buffers_min": 1, "buffers_max": 1}


def run(n_live: int, n_dropped: int) -> dict[str, Any]:
    in_process = {str(n): relations.run(n) for n in (1_000, n_live, n_dropped)}
    with server() as publisher, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)
        live = Source(publisher, "live")
        _publish_all(live)
        _make_tables(live, n_live)
        first, again = live.slots(1, "first"), live.slots(1, "again")
        for _ in range(2):
            _write_each(live, n_live)
        measured = {
            "in_process": in_process,
            "tables": n_live,
            "live": _measured(ours.drain(spark, live, first[0], 2 * n_live, ours.nothing, **_BUFFERS)),
            "live_again": _measured(ours.drain(spark, live, again[0], 2 * n_live, ours.nothing, **_BUFFERS)),
        }
        live.close()
        dropped = Source(publisher, "dropped")
        _publish_all(dropped)
        (slot,) = dropped.slots(1)
        _make_and_drop(dropped, n_dropped)
        drained = ours.drain(spark, dropped, slot, n_dropped, ours.nothing, **_BUFFERS)
        measured |= {"dropped_tables": n_dropped, "dropped": _measured(drained)}
        dropped.close()
    return measured


def _measured(drained: Drained) -> dict[str, Any]:
    usage = drained.usage
    return {
        "seconds": drained.handler_s,
        "reader_growth_mb": usage.growth_bytes.get("reader", 0) / 2**20,
        "buffer_growth_mb": usage.growth_bytes.get("buffers", 0) / 2**20,
        "reader_cpu_s": usage.cpu_s.get("reader", 0.0),
        "buffers_cpu_s": usage.cpu_s.get("buffers", 0.0),
        "sequencer_cpu_s": usage.cpu_s.get("sequencer", 0.0),
    }


def _publish_all(source: Source) -> None:
    source.execute(f"drop publication {PUBLICATION}")
    source.execute(f"create publication {PUBLICATION} for all tables")


def _make_tables(source: Source, n: int) -> None:
    source.execute(
        f"do $$ begin for i in 1..{n} loop execute format('create table t%s ({COLUMNS})', i); "
        f"if i % {_TABLES_PER_COMMIT} = 0 then commit; end if; end loop; end $$"
    )


def _write_each(source: Source, n: int) -> None:
    """A row for each table: an insert the first time, an update the second."""
    source.execute(
        f"do $$ begin for i in 1..{n} loop execute format('insert into t%s {_ROW} on conflict (id) do update set "
        "k = excluded.k', i); commit; end loop; end $$".replace("'a note'", "''a note''")
    )


def _make_and_drop(source: Source, n: int) -> None:
    source.execute(
        f"do $$ begin for i in 1..{n} loop execute format('create table d%s (id int, k int)', i); "
        "execute format('insert into d%s values (1, 1)', i); commit; "
        "execute format('drop table d%s', i); commit; end loop; end $$"
    )
