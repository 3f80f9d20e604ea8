"""What the storage keeps of a slot's snapshots: the decision, what was taken, and what people asked for.

Small documents below ``snapshots/``:

- ``decision.json``: whether tables that had rows before are to be read. It is written *before* the slot is created, so
  that a run that was killed in between is not taken for one that never wanted snapshots. It names the tables that were
  published by then: no transaction can have written to them unseen by the slot.
- ``RELID.taken-N.json``: generation N of a table, and the signature of the table's definition at that time. It is
  written before the sink commits the rows. The sink's ``_snapshots`` says whether they were committed. This says with
  which bounds, for the run that finds the rows and no line about them. Later the signature tells what has ended the
  generation.
- ``RELID.told-N.json``: a user's function has been given generation N. (A Delta sink keeps that itself.)
- ``RELID.request.json``: a person asks for a new generation, by all rows of the source, or by those of a key range
  (``where``: a repair). ``RELID.cancelled.json``: a person does not want one.

One object for each table, because a document of ten thousand tables would be written again for each of them.

Callers: the reader writes the decision, ``actors.snapshots`` the rest, and the command line requests and cancellations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.snapshot.key_filter import KeyFilter, parse_key_filter
from xidstream.pipeline.storage.envelope import Document, now
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

_THREADS: Final = 16
_T = TypeVar("_T")
_REMEDY: Final = (
    "restore the object; or remove it, and ask for new snapshots (`xidstream snapshot request`): rows that were "
    "taken stay as they are"
)


@dataclass(frozen=True)
class TakenSnapshot:
    """``signature``: JSON, as ``pipeline.snapshot.invalidation`` made it. ``where``: which rows were read from the
    source, if the others were carried over from the generation before; None for all."""

    generation: Generation
    signature: Mapping[str, Any]
    where: KeyFilter | None = None


@dataclass(frozen=True)
class Wishes:
    """By relid: the table's name, as the person who asked gave it. ``ranges``: those of ``requests`` that are for rows
    of a key range alone."""

    requests: Mapping[int, str]
    cancelled: Mapping[int, str]
    ranges: Mapping[int, KeyFilter] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wish:
    table: str
    where: KeyFilter | None = None


_DECISION: Final = Document[Decision](
    "xidstream.snapshot-decision",
    1,
    _REMEDY,
    lambda decision: {
        "takes_snapshots": decision.takes_snapshots,
        "published": {str(relid): text for relid, text in decision.published.items()},
        "slot_xmax": decision.slot_xmax,
        "decided_at": now().isoformat(),
    },
    lambda content: Decision(
        bool(content["takes_snapshots"]),
        {int(relid): str(text) for relid, text in content["published"].items()},
        None if content["slot_xmax"] is None else int(content["slot_xmax"]),
    ),
)
_TAKEN: Final = Document[TakenSnapshot](
    "xidstream.snapshot-taken",
    2,
    _REMEDY,
    lambda taken: {
        "generation": taken.generation.to_json(),
        "signature": dict(taken.signature),
        **_where_json(taken.where),
    },
    lambda content: TakenSnapshot(
        Generation.from_json(content["generation"]), content["signature"], _where_of(content)
    ),
)
_DELIVERED: Final = Document("xidstream.snapshot-told", 2, _REMEDY, Generation.to_json, Generation.from_json)
_WISH: Final = Document[_Wish](
    "xidstream.snapshot-wish",
    1,
    _REMEDY,
    # An xidstream that knows no ranges takes the whole table.
    lambda wish: {"table": wish.table, "asked_at": now().isoformat(), **_where_json(wish.where)},
    lambda content: _Wish(str(content["table"]), _where_of(content)),
)


def _where_json(where: KeyFilter | None) -> dict[str, str]:
    return {} if where is None else {"where": str(where)}


def _where_of(content: Mapping[str, Any]) -> KeyFilter | None:
    return None if content.get("where") is None else parse_key_filter(content["where"])


def write_decision(storage: Storage, layout: Layout, decision: Decision) -> None:
    """Durably, in place of an earlier one. Raises StorageFault."""
    _DECISION.write(storage, layout.snapshot_decision_key, decision)


def read_decision(storage: Storage, layout: Layout) -> Decision | None:
    """The decision; None where none was recorded. Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _DECISION.read(storage, layout.snapshot_decision_key)


def write_taken(storage: Storage, layout: Layout, taken: TakenSnapshot) -> None:
    """Durably, in place of the table's earlier one. Raises StorageFault."""
    _TAKEN.write(storage, _taken_key(layout, taken.generation), taken)


def read_taken(storage: Storage, layout: Layout) -> list[TakenSnapshot]:
    """All of the slot. Raises SegmentCorrupt, Unsupported, StorageFault."""
    return _read_all(storage, layout, "taken-", _TAKEN)


def forget_taken(storage: Storage, layout: Layout, generations: Iterable[Generation]) -> None:
    """Raises StorageFault."""
    storage.delete([_taken_key(layout, generation) for generation in generations])


def write_delivered(storage: Storage, layout: Layout, generation: Generation) -> None:
    """The function has the generation's rows. Raises StorageFault."""
    _DELIVERED.write(storage, _delivered_key(layout, generation), generation)


def read_delivered(storage: Storage, layout: Layout) -> list[Generation]:
    """All of the slot that functions were given and that still stand. Raises SegmentCorrupt, Unsupported,
    StorageFault."""
    return _read_all(storage, layout, "told-", _DELIVERED)


def forget_delivered(storage: Storage, layout: Layout, generations: Iterable[Generation]) -> None:
    """Raises StorageFault."""
    storage.delete([_delivered_key(layout, generation) for generation in generations])


def request(storage: Storage, layout: Layout, relid: int, name: str, where: KeyFilter | None = None) -> bool:
    """A person wants a new generation of the table; that ends a cancellation. ``where``: by these rows of the source
    alone. Returns whether it is recorded: one for all rows, which nobody has taken yet, stays in place of a range. A
    later range takes the place of an earlier one. Raises SegmentCorrupt, StorageFault."""
    key = layout.snapshot_key(relid, "request")
    storage.delete([layout.snapshot_key(relid, "cancelled")])
    if where is not None:
        there = _WISH.read(storage, key)
        if there is not None and there.where is None:
            return False
    _WISH.write(storage, key, _Wish(name, where))
    return True


def cancel(storage: Storage, layout: Layout, relid: int, name: str) -> None:
    """A person wants no generation of the table, until a request. Raises StorageFault."""
    _WISH.write(storage, layout.snapshot_key(relid, "cancelled"), _Wish(name))
    forget_request(storage, layout, relid)


def forget_request(storage: Storage, layout: Layout, relid: int, where: KeyFilter | None = None) -> None:
    """``where``: only if it is for these rows, and not for others, which were asked for since. Raises SegmentCorrupt,
    StorageFault."""
    key = layout.snapshot_key(relid, "request")
    if where is not None:
        there = _WISH.read(storage, key)
        if there is not None and there.where != where:
            return
    storage.delete([key])


def read_wishes(storage: Storage, layout: Layout) -> Wishes:
    """Raises SegmentCorrupt, StorageFault."""
    found: dict[str, dict[int, _Wish]] = {"request": {}, "cancelled": {}}
    for key, (relid, kind) in _keys(storage, layout):
        wish = _WISH.read(storage, key) if kind in found else None
        if wish is not None:
            found[kind][relid] = wish
    requests, cancelled = (
        {relid: wish.table for relid, wish in found[kind].items()} for kind in ("request", "cancelled")
    )
    ranges = {relid: wish.where for relid, wish in found["request"].items() if wish.where is not None}
    return Wishes(requests, cancelled, ranges)


def _keys(storage: Storage, layout: Layout) -> Iterator[tuple[str, tuple[int, str]]]:
    for key in storage.list_keys(layout.snapshots_prefix):
        name = layout.parse_snapshot_key(key)
        if name is not None:
            yield key, name


def _delivered_key(layout: Layout, generation: Generation) -> str:
    return layout.snapshot_key(generation.relid, f"told-{generation.number}")


def _taken_key(layout: Layout, generation: Generation) -> str:
    return layout.snapshot_key(generation.relid, f"taken-{generation.number}")


def _read_all(storage: Storage, layout: Layout, kind: str, document: Document[_T]) -> list[_T]:
    """All documents of a kind, several read at a time: a slot may have one for each of ten thousand tables, and an
    object store lets each of them wait."""
    keys = [key for key, (_, each) in _keys(storage, layout) if each.startswith(kind)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot-record") as threads:
        found = threads.map(lambda key: document.read(storage, key), keys)
        return [each for each in found if each is not None]  # else it was removed since the listing
