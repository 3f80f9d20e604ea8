"""Scenario *many tables*: what a block takes along follows what its rows use, whatever was declared before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import Scenario, Side
from xidstream.pipeline.pgoutput.relids import relids_of
from xidstream.pipeline.stream import PlainBlock, StreamEvent, TransactionBlock

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("postgres_server", [18], indirect=True),
    pytest.mark.parametrize("scenario", [(4, "on")], indirect=True, ids=["proto4-on"]),
]


class Blocks:
    """The blocks that one side cuts: how many rows' relations each names, and how many versions it takes along."""

    def __init__(self, side: Side) -> None:
        self.named: list[int] = []
        pipeline: Any = side.pipeline
        send = pipeline._send

        def look(events: Iterable[StreamEvent]) -> None:
            kept = list(events)
            for event in kept:
                if isinstance(event, (PlainBlock, TransactionBlock)) and event.block is not None:
                    streamed = isinstance(event, TransactionBlock) and event.streamed
                    relids = relids_of(event.block.payload, event.block.lengths, streamed=streamed)
                    assert sorted(event.block.relations.relations) == relids
                    self.named.append(len(relids))
            send(kept)

        pipeline._send = look


@pytest.mark.parametrize("n_tables", [500, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_rows_of_many_partitions_come_with_their_own_definitions_and_no_others(
    scenario: Scenario, n_tables: int
) -> None:
    scenario.run(
        "CREATE TABLE m (id bigint, v text) PARTITION BY LIST (id)",
        f"DO $$ BEGIN FOR i IN 1..{n_tables} LOOP "
        "EXECUTE format('CREATE TABLE p%s PARTITION OF m FOR VALUES IN (%s)', i, i); END LOOP; END $$",
    )
    scenario.open(immediate=False)
    blocks = Blocks(scenario.streamed)
    everywhere = f"INSERT INTO m SELECT i, '%s' || i FROM generate_series(1, {n_tables}) i"
    scenario.run(everywhere % "plain")
    scenario.read()
    assert max(blocks.named) > 100, "a transaction over all of them names many in a block"

    blocks.named.clear()
    for i in (1, 7, n_tables - 1, 7):
        scenario.run(f"INSERT INTO m VALUES ({i}, 'one')")
        scenario.read()
    assert blocks.named == [1, 1, 1, 1], "a row's block takes one version along, though all are known"

    stream = scenario.session(everywhere % "streamed", everywhere % "again")
    scenario.run(f"INSERT INTO m VALUES ({n_tables}, 'beside the stream')")
    scenario.read()
    stream.execute("COMMIT")
    scenario.run("INSERT INTO m VALUES (3, 'after the stream')")
    scenario.run("ALTER TABLE m ADD COLUMN w int", "INSERT INTO m VALUES (3, 'wider', 5), (4, 'wider', 6)")
    scenario.agree()
    rows = scenario.sink.rows()
    assert len(rows) == 3 * n_tables + 8
    assert all(row["table"] == f"public.p{row['id']}" for row in rows)
    assert [(row["id"], row["v"], row["w"]) for row in rows if "w" in row] == [
        (3, "wider", 5),
        (4, "wider", 6),
    ]


def test_tables_that_are_made_and_dropped_leave_no_row_and_no_other_tables_definition_behind(
    scenario: Scenario,
) -> None:
    """Their names come again with other columns, and their oids do not."""
    scenario.tables("stays")
    blocks = Blocks(scenario.streamed)
    for i in range(60):
        column = f"c{i % 3}"
        scenario.run(
            f"CREATE TABLE comes ({column} int PRIMARY KEY, v text)",
            f"INSERT INTO comes VALUES ({i}, 'x')",
            f"INSERT INTO stays VALUES ({i}, 'y')",
            "DROP TABLE comes",
        )
    with_stream = scenario.session("INSERT INTO stays VALUES (1000, 'open')")
    scenario.read()
    with_stream.execute("COMMIT")
    scenario.agree()
    rows = scenario.sink.rows()
    assert [row[f"c{row['_seq'] + i % 3}"] for i, row in enumerate(rows[:-1:2])] == list(range(60))
    assert [row["id"] for row in rows if row["table"] == "public.stays"] == [*range(60), 1000]
    assert len({row["relid"] for row in rows}) == 61
    assert max(blocks.named) <= 61
