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
- ``RELID.request.json``: a person asks for a new generation. ``RELID.cancelled.json``: a person does not want one.

One object for each table, because a document of ten thousand tables would be written again for each of them.

Callers: the reader writes the decision, ``actors.snapshot`` the rest, and the command line requests and cancellations.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.segments.envelope import seal, unseal
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.storage import Storage
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation

DECISION: Final = "xidstream.snapshot-decision"
TAKEN: Final = "xidstream.snapshot-taken"
TOLD: Final = "xidstream.snapshot-told"
WISH: Final = "xidstream.snapshot-wish"
VERSION: Final = 1
_THREADS: Final = 16
_REMEDY: Final = (
    "restore the object; or remove it, and ask for new snapshots (`xidstream snapshot request`): rows that were "
    "taken stay as they are"
)


@dataclass(frozen=True)
class Taken:
    """``signature``: JSON, as ``pipeline.snapshot.generations`` made it."""

    generation: Generation
    signature: Mapping[str, Any]


@dataclass(frozen=True)
class Wishes:
    """By relid: the table's name, as the person who asked gave it."""

    requests: Mapping[int, str]
    cancelled: Mapping[int, str]


def write_decision(storage: Storage, layout: Layout, decision: Decision) -> None:
    """Durably, in place of an earlier one. Raises StorageFault."""
    content = {
        "takes_snapshots": decision.takes_snapshots,
        "published": {str(relid): text for relid, text in decision.published.items()},
        "slot_xmax": decision.slot_xmax,
        "decided_at": _now(),
    }
    storage.write_bytes(layout.snapshot_decision_key, seal(DECISION, VERSION, content))


def read_decision(storage: Storage, layout: Layout) -> Decision | None:
    """None where none was recorded. Raises SegmentCorrupt, StorageFault."""
    content = _read(storage, layout.snapshot_decision_key, DECISION)
    if content is None:
        return None
    try:
        published = {int(relid): str(text) for relid, text in content["published"].items()}
        # Earlier versions did not record it: their slots are older than whoever waits for a standby now.
        xmax = content.get("slot_xmax", 0)
        return Decision(bool(content["takes_snapshots"]), published, None if xmax is None else int(xmax))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(layout.snapshot_decision_key) from error


def write_taken(storage: Storage, layout: Layout, taken: Taken) -> None:
    """Durably, in place of the table's earlier one. Raises StorageFault."""
    content = {"generation": taken.generation.to_json(), "signature": dict(taken.signature)}
    storage.write_bytes(_taken_key(layout, taken.generation), seal(TAKEN, VERSION, content))


def read_taken(storage: Storage, layout: Layout) -> list[Taken]:
    """All of the slot. Raises SegmentCorrupt, StorageFault."""
    found = []
    for key, content in _read_all(storage, layout, "taken-", TAKEN):
        try:
            found.append(Taken(Generation.from_json(content["generation"]), content["signature"]))
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise _wrong(key) from error
    return found


def forget_taken(storage: Storage, layout: Layout, generations: Iterable[Generation]) -> None:
    """Raises StorageFault."""
    storage.delete([_taken_key(layout, generation) for generation in generations])


def write_told(storage: Storage, layout: Layout, generation: Generation) -> None:
    """The function has the generation's rows. Raises StorageFault."""
    storage.write_bytes(_told_key(layout, generation), seal(TOLD, VERSION, generation.to_json()))


def read_told(storage: Storage, layout: Layout) -> list[Generation]:
    """All of the slot that functions were given and that still stand. Raises SegmentCorrupt, StorageFault."""
    found = []
    for key, content in _read_all(storage, layout, "told-", TOLD):
        try:
            found.append(Generation.from_json(content))
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise _wrong(key) from error
    return found


def forget_told(storage: Storage, layout: Layout, generations: Iterable[Generation]) -> None:
    """Raises StorageFault."""
    storage.delete([_told_key(layout, generation) for generation in generations])


def request(storage: Storage, layout: Layout, relid: int, name: str) -> None:
    """A person wants a new generation of the table; that ends a cancellation. Raises StorageFault."""
    storage.delete([layout.snapshot_key(relid, "cancelled")])
    storage.write_bytes(layout.snapshot_key(relid, "request"), _wish(name))


def cancel(storage: Storage, layout: Layout, relid: int, name: str) -> None:
    """A person wants no generation of the table, until a request. Raises StorageFault."""
    storage.write_bytes(layout.snapshot_key(relid, "cancelled"), _wish(name))
    forget_request(storage, layout, relid)


def forget_request(storage: Storage, layout: Layout, relid: int) -> None:
    storage.delete([layout.snapshot_key(relid, "request")])


def read_wishes(storage: Storage, layout: Layout) -> Wishes:
    """Raises SegmentCorrupt, StorageFault."""
    found: dict[str, dict[int, str]] = {"request": {}, "cancelled": {}}
    for key, (relid, kind) in _keys(storage, layout):
        content = _read(storage, key, WISH) if kind in found else None
        if content is not None:
            found[kind][relid] = str(content.get("table"))
    return Wishes(found["request"], found["cancelled"])


def _wish(name: str) -> bytes:
    return seal(WISH, VERSION, {"table": name, "asked_at": _now()})


def _keys(storage: Storage, layout: Layout) -> Iterator[tuple[str, tuple[int, str]]]:
    for key in storage.list_keys(layout.snapshots_prefix):
        name = layout.parse_snapshot_key(key)
        if name is not None:
            yield key, name


def _told_key(layout: Layout, generation: Generation) -> str:
    return layout.snapshot_key(generation.relid, f"told-{generation.number}")


def _taken_key(layout: Layout, generation: Generation) -> str:
    return layout.snapshot_key(generation.relid, f"taken-{generation.number}")


def _read(storage: Storage, key: str, format_name: str) -> dict[str, Any] | None:
    data = storage.read_buffer(key)
    return None if data is None else unseal(bytes(data), format_name, VERSION, key, remedy=_REMEDY)


def _read_all(
    storage: Storage, layout: Layout, kind: str, format_name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys and contents of all documents of a kind, several read at a time: a slot may have one for each of ten
    thousand tables, and an object store lets each of them wait."""
    keys = [key for key, (_, each) in _keys(storage, layout) if each.startswith(kind)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot-record") as threads:
        for key, content in zip(
            keys, threads.map(lambda key: _read(storage, key, format_name), keys), strict=True
        ):
            if content is not None:  # else it was removed since the listing
                yield key, content


def _wrong(key: str) -> SegmentCorrupt:
    return SegmentCorrupt(f"object {key!r} lacks a part or has a wrong one", remedy=_REMEDY)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()
