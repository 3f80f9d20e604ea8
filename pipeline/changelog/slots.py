"""Whose log it is: the slots that write below a root, and the directories that are there.

The rows do not say which slot brought them. The commits do: each carries an application transaction with the slot's
id (system identifier/database/slot), and ``…/owner`` beside it. deltalake answers what the version of a known id is,
and lists none. So the ids are read from the Delta log of ``_transactions``: its last checkpoint, and the commits after
that.

Commit LSNs of two slots have no common order. With two of them, each question is for one.

Called by ``change_log``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg_rules import labelled_table

if TYPE_CHECKING:
    from deltalake.fs import DeltaStorageHandler

    from xidstream.pipeline.log_tables.batch_parts import TableName

_OWNER: Final = "/owner"
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\..*parquet")
_COMMIT: Final = re.compile(r"(\d{20})\.json")


def application_ids(
    transactions: Location, notes: MutableMapping[str, frozenset[str]] | None = None
) -> list[str]:
    """The application ids of the slots that have written to the Delta table ``_transactions`` there.

    ``notes``: what the files of its log said at an earlier call; what they say now is left there."""
    noted = {} if notes is None else dict(notes)
    store = _store(transactions)
    names = _listing(store, "_delta_log")
    checkpoints: dict[int, list[str]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            checkpoints.setdefault(int(match[1]), []).append(name)
    last = max(checkpoints, default=-1)
    said: dict[str, frozenset[str]] = {}
    for name in checkpoints.get(last, []):
        said[name] = noted.get(name) or frozenset(_of_checkpoint(store, name))
    for name in names:
        match = _COMMIT.fullmatch(name)
        if match and int(match[1]) > last:
            said[name] = noted[name] if name in noted else frozenset(_of_commit(store, name))
    if notes is not None:
        notes.clear()
        notes.update(said)
    found = {id_ for each in said.values() for id_ in each}
    owned = {id_.removesuffix(_OWNER) for id_ in found if id_.endswith(_OWNER)}
    return sorted(owned)


def chosen_slot(found: list[str], slot: str | None) -> str:
    """The application id of ``slot``: its name, or the whole id where two servers have slots of one name."""
    if slot is None:
        if len(found) == 1:
            return found[0]
        if not found:
            raise UsageError("no slot has written to this change log", remedy="run `xidstream run` first")
        raise UsageError(
            "several slots write below this root, and their commits have no common order",
            remedy=f"name one of them, as ChangeLog(uri, slot=…): {', '.join(found)}",
        )
    matching = [id_ for id_ in found if slot in (id_, id_.rpartition("/")[2])]
    if len(matching) == 1:
        return matching[0]
    what = "no slot" if not matching else "more than one slot"
    raise UsageError(
        f"{what} {slot} has written to this change log",
        remedy=f"give one of: {', '.join(found)}",
    )


def table_directories(root: Location) -> list[str]:
    """The names below the root that are Delta tables, and may be tables' of a source.

    A root may have other entries: a file system's ``.snapshot``, somebody's notes. They are passed over.
    """
    names = [
        info.base_name for info in _entries(_store(root), "") if not info.is_file and "." in info.base_name
    ]
    return sorted(name for name in names if name[0] not in "_." and _is_delta_table(root.child(name)))


def _is_delta_table(location: Location) -> bool:
    from deltalake import DeltaTable

    return bool(DeltaTable.is_deltatable(location.uri, location.storage_options))


def table_of(directory: str, read_source: Callable[[], str | None]) -> TableName | None:
    """The table that a directory belongs to; None for a directory that is no table's of a log.

    ``read_source``: what the Delta table there says of itself, ``schema.table``. It is asked only where the name of the
    directory is cut, or is nobody's.
    """
    try:
        return locations.decode_table(directory)
    except ValueError:
        source = read_source() or ""
        parts = source.split(".")
        # Earlier versions did not quote names with dots. The directory tells where the schema ends.
        splits = [(".".join(parts[:i]), ".".join(parts[i:])) for i in range(1, len(parts))]
        pairs = (pair for pair in (labelled_table(source), *splits) if pair is not None)
        return next((pair for pair in pairs if locations.encode_table(*pair) == directory), None)


def _store(location: Location) -> DeltaStorageHandler:
    from deltalake.fs import DeltaStorageHandler

    return DeltaStorageHandler(location.uri, location.storage_options)


def _entries(store: DeltaStorageHandler, folder: str) -> list[Any]:
    """What stands in a folder, each as ``pyarrow.fs.FileInfo``."""
    wanted = SimpleNamespace(base_dir=folder, allow_not_found=True, recursive=False)
    return list(store.get_file_info_selector(wanted))


def _listing(store: DeltaStorageHandler, folder: str) -> list[str]:
    return [info.base_name for info in _entries(store, folder)]


def _of_checkpoint(store: DeltaStorageHandler, name: str) -> set[str]:
    import pyarrow.parquet as pq

    with store.open_input_file(f"_delta_log/{name}") as file:
        rows = pq.ParquetFile(file).read(["txn"])["txn"].to_pylist()
    return {row["appId"] for row in rows if row is not None}


def _of_commit(store: DeltaStorageHandler, name: str) -> set[str]:
    with store.open_input_file(f"_delta_log/{name}") as file:
        lines = file.read().splitlines()
    actions = [json.loads(line) for line in lines if line.startswith(b'{"txn"')]
    return {action["txn"]["appId"] for action in actions}
