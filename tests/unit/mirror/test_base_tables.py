"""All base tables of a slot: what a vacuum waits for, when it begins again, and when it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.manifest import ManifestWriter
from xidstream.pipeline.errors import ComponentLost, StorageFault, Superseded
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.mirror import base_tables
from xidstream.pipeline.mirror.base_tables import ATTEMPTS, BaseTables
from xidstream.pipeline.mirror.vacuum import Vacuumed

SLOT = "7/shop/orders"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BaseTables:
    log = SimpleNamespace(application_id=SLOT)
    monkeypatch.setattr(base_tables, "SlotLog", lambda root, slot: log)
    return BaseTables(str(tmp_path), None, 1 << 20)


def test_a_vacuum_waits_for_the_refresh_in_hand(tables: BaseTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that it has written and not committed would be the vacuum's: both have one number."""
    order: list[str] = []
    is_refreshing, may_end = threading.Event(), threading.Event()

    def refresh(*whatever: Any) -> None:
        is_refreshing.set()
        may_end.wait(60)
        order.append("refreshed")

    def vacuum(*whatever: Any) -> Vacuumed:
        order.append("vacuumed")
        return Vacuumed()

    monkeypatch.setattr(tables, "_refresh", refresh)
    monkeypatch.setattr(base_tables, "vacuum_tables", vacuum)
    monkeypatch.setattr(base_tables.rewrite, "mirror_session", lambda spark: spark)
    context = SimpleNamespace(getLocalProperty=lambda name: None, setLocalProperty=lambda name, value: None)
    spark: Any = SimpleNamespace(sparkContext=context)
    threads = [threading.Thread(target=tables.refresh, args=(spark,))]
    threads[0].start()
    assert is_refreshing.wait(60)
    with pytest.raises(ComponentLost, match="given up"):
        tables.vacuum(60, lambda: True)
    threads.append(threading.Thread(target=tables.vacuum, args=(60,)))
    threads[1].start()
    threads[1].join(0.5)
    assert order == []
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert order == ["refreshed", "vacuumed"]


def test_a_vacuum_in_which_an_earlier_mirror_commits_begins_again(
    tables: BaseTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Any] = [SnapshotOutdated("public.a"), Vacuumed(3, 4)]

    def vacuum(*whatever: Any) -> Vacuumed:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(base_tables, "vacuum_tables", vacuum)
    assert tables.vacuum(60) == Vacuumed(3, 4)
    outcomes[:] = [SnapshotOutdated("public.a")] * ATTEMPTS
    with pytest.raises(StorageFault, match="changed by others"):
        tables.vacuum(60)


def test_a_vacuum_of_a_mirror_that_was_overtaken_says_so(tables: BaseTables, tmp_path: Path) -> None:
    assert tables.vacuum(60) == Vacuumed() and tables.owner == 1
    ManifestWriter(DeltaBases(Location.parse(str(tmp_path))), SLOT).claim()
    with pytest.raises(Superseded, match="another mirror of slot orders has taken over"):
        tables.vacuum(60)
