"""The sink's part of the preflight: what can be known of it without Spark. Nothing is changed, nothing printed.

``pipeline.preflight.checks`` calls the check of the sink that the run will have: of ``delta:URI`` or ``toDelta``, of a
function, or of the console.

A Delta root is tried by writing a file to it, because only that tells whether it can be written: the file is removed
again, and nothing else is made. Its tables are compared with the server by the rules that the sink itself follows
(``ownership``), under a tenure that no other run can outrank: who holds the slot is not this check's question.
Of the published tables at most ``MOST_TABLES`` are opened: each costs a request to an object store, and the sink looks
at every table again when it opens it.

Whether an object store answers is known at the first refusal. deltalake would repeat a request for minutes.
"""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from xidstream.pipeline.errors import ConfigError, StorageFault, UsageError, XidstreamError, known_reason
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import LogTables, LogTableWriter
from xidstream.pipeline.log_tables.segment_links import how_segments_reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.quantities import human_s
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.local_paths import overlap
from xidstream.pipeline.sinks.foreach import resolve
from xidstream.pipeline.sinks.sink import sink_type

if TYPE_CHECKING:
    from xidstream.pipeline.iceberg.catalogs import IcebergAddress

MOST_TABLES: Final = 100
_THREADS: Final = 8
_PROBE: Final = ".xidstream-check"
_ONE_ATTEMPT: Final = {"max_retries": "1", "retry_timeout": "5s", "connect_timeout": "5s", "timeout": "10s"}


@dataclass(frozen=True)
class ServerSide:
    """The other side that a sink is compared with: the server's history, and the published tables.

    ``tenure`` is called when the tables are open, because another run may write to them: what they hold is older than
    the end of the WAL that is read after that. ``compare`` is given the number of the last run that wrote to them and
    the last commit that they hold, and finds whether these fit what the storage has of the slot.
    """

    identity: SlotIdentity
    tenure: Callable[[], Tenure]
    tables: Sequence[tuple[str, str]]
    compare: Callable[[int, Lsn], list[Finding]] = lambda owner, commit_lsn: []


SinkCheck = Callable[["ServerSide | None"], "list[Finding]"]
"""Given the server's side, or None where the server was not reached. Raises nothing."""


def check_of_spec(spec: str, storage_uri: str) -> SinkCheck:
    """The check of the setting ``sink``. Raises ConfigError for what names none.

    ``storage_uri``: the setting; empty where it is not given.
    """
    return sink_type(spec).check(storage_uri)


def check_of_named_function(spec: str) -> SinkCheck:
    """The check of ``module:function``."""
    return lambda server: [_check_named_function(spec)]


def check_of_function(function: Callable[..., Any]) -> SinkCheck:
    """The check of a function that the caller holds."""
    return lambda server: [
        _check_arguments(function, getattr(function, "__qualname__", type(function).__name__))
    ]


def check_of_delta(
    root_uri: str, storage_uri: str, storage_options: Mapping[str, str] | None = None
) -> SinkCheck:
    return lambda server: _check_delta(root_uri, storage_uri, storage_options, server)


def held_by_delta(root_uri: str, application_id: str) -> tuple[int, Lsn]:
    """The number of the slot's last run that wrote to the root, and the last commit of it that the tables hold; 0 for
    none. Raises ConfigError, StorageFault."""
    from xidstream.pipeline.delta.delta_tables import DeltaTables

    return held_by(DeltaTables(Location.parse(root_uri)), application_id)


def held_by(tables: LogTables, application_id: str) -> tuple[int, Lsn]:
    """What ``held_by_delta`` says, for tables of any format. Raises StorageFault."""
    from xidstream.pipeline.log_tables.ownership import Ownership

    try:
        writer = tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
    except XidstreamError:
        raise
    except Exception as error:
        raise StorageFault(f"the sink's root {tables.root} cannot be read: {_reason(error)}") from error
    if writer is None:
        return 0, INVALID_LSN
    return Ownership.owner_of(writer, application_id), Lsn(writer.watermark(application_id))


def check_of_iceberg(argument: str, storage_uri: str) -> SinkCheck:
    """``argument``: a catalog and a namespace, as the setting has them."""
    return lambda server: _check_iceberg(argument, storage_uri, server)


# -- a function ----------------------------------------------------------------------------------------


def _check_named_function(spec: str) -> Finding:
    try:
        return _check_arguments(resolve(spec), spec)
    except UsageError as error:
        return Finding.of_error("sink", error)


def _check_arguments(function: Callable[..., Any], label: str) -> Finding:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return Finding.failed(
            "sink", f"{label} cannot be called with one argument", "take one: the batch", UsageError
        )
    except ValueError:
        pass  # a builtin does not tell its arguments
    return Finding.ok("sink", f"sink {label} can be called with a batch")


# -- Delta ---------------------------------------------------------------------------------------------


def _check_delta(
    root_uri: str, storage_uri: str, storage_options: Mapping[str, str] | None, server: ServerSide | None
) -> list[Finding]:
    try:
        root = Location.parse(root_uri, dict(storage_options) if storage_options else None)
    except ConfigError as error:
        return [Finding.of_error("sink", error)]
    root = _asked_once(root)
    shown = redacted(root.uri)
    if storage_uri and overlap(root.uri, storage_uri):
        return [Finding.of_error("sink", _overlapping(shown, redacted(storage_uri)))]
    try:
        _probe(root)
    except Exception as error:  # noqa: BLE001 - deltalake raises its own and many others
        return [
            Finding.failed(
                "sink",
                f"Delta root {shown} cannot be written: {_reason(error)}",
                "check that it is there, and that this user or role may write to it"
                + ("" if root.is_local else "; the credentials are those of the environment"),
            )
        ]
    findings = [Finding.ok("sink", f"Delta root {shown} can be written")]
    try:
        if storage_uri:
            way = how_segments_reach(root, storage_uri).value
            findings.append(Finding.ok("sink_files", f"large transactions reach the Delta tables by {way}"))
        from xidstream.pipeline.changelog.slots import application_ids
        from xidstream.pipeline.delta.delta_tables import DeltaTables

        transactions = root.child(locations.TRANSACTIONS)
        findings += check_tables(DeltaTables(root), server, partial(application_ids, transactions))
        return findings if server is None else findings + _check_consumers(root, server)
    except XidstreamError as error:
        return [*findings, Finding.of_error("sink_tables", error)]
    except Exception as error:  # noqa: BLE001 - as above
        remedy = "look at the root: is it this sink's, and are its tables whole?"
        return [
            *findings,
            Finding.failed("sink_tables", f"Delta root {shown} cannot be read: {_reason(error)}", remedy),
        ]


def _check_consumers(root: Location, server: ServerSide) -> list[Finding]:
    """Consumers that hold back the change log, and seem to be gone."""
    from xidstream.pipeline.changelog.consumers import read_positions

    slot, now = server.identity.application_id, datetime.datetime.now(datetime.timezone.utc)
    last = held_by_delta(root.uri, slot)[1] if (positions := read_positions(root, slot)) else INVALID_LSN
    return [
        Finding.warning(
            "consumers",
            f"consumer {each.name} of the change log has told nothing for {human_s(each.age_s(now))}: what it has not "
            f"processed, behind {each.lsn}, is not removed (log_retention)",
            f"see whether it still is there; if not: `xidstream consumer remove --name {each.name}`",
        )
        for each in positions
        if each.is_forgotten(int(last), now)
    ]


# -- Iceberg -------------------------------------------------------------------------------------------


def _check_iceberg(argument: str, storage_uri: str, server: ServerSide | None) -> list[Finding]:
    """The catalog must answer, and the warehouse must be one that can be written. Nothing is made."""
    from xidstream.pipeline.changelog.iceberg_bases import refuse_base_tables
    from xidstream.pipeline.iceberg.catalogs import IcebergAddress
    from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables

    try:
        address = IcebergAddress.parse(argument)
        root = address.root()
        tables = IcebergTables(address)
        if storage_uri and root is not None and overlap(root.uri, storage_uri):
            return [Finding.of_error("sink", _overlapping(redacted(root.uri), redacted(storage_uri)))]
        tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
        refuse_base_tables(tables)
        if root is not None:
            _probe(_asked_once(root))
    except XidstreamError as error:
        return [Finding.of_error("sink", error)]
    except Exception as error:  # noqa: BLE001 - of SQLAlchemy, of pyiceberg, of the file system
        remedy = "check the catalog's settings, that it is there, and that this user may write to it"
        return [Finding.failed("sink", f"{tables.root} cannot be used: {_reason(error)}", remedy)]
    findings = [Finding.ok("sink", f"the catalog of {tables.root} answers, and its tables can be written")]
    try:
        if root is not None and storage_uri:
            way = how_segments_reach(root, storage_uri).value
            findings.append(Finding.ok("sink_files", f"large transactions reach the Iceberg tables by {way}"))
        return findings + check_tables(tables, server, partial(_iceberg_slots, address))
    except XidstreamError as error:
        return [*findings, Finding.of_error("sink_tables", error)]
    except Exception as error:  # noqa: BLE001 - as above
        remedy = "look at the namespace: is it this sink's, and are its tables whole?"
        return [
            *findings,
            Finding.failed("sink_tables", f"{tables.root} cannot be read: {_reason(error)}", remedy),
        ]
    finally:
        tables.close()


def _iceberg_slots(address: IcebergAddress) -> list[str]:
    from xidstream.pipeline.changelog.iceberg_root import IcebergRoot

    with closing(IcebergRoot(address)) as root:
        found = root.open(locations.TRANSACTIONS)
        return [] if found is None else found.slots()


def _asked_once(root: Location) -> Location:
    if root.is_local:
        return root
    return dataclasses.replace(root, storage_options={**_ONE_ATTEMPT, **(root.storage_options or {})})


def _overlapping(root: str, storage: str) -> ConfigError:
    return ConfigError(
        f"storage {storage} and the sink's root {root} are one folder, or one is in the other",
        remedy="give each a folder of its own, beside the other. If a run has used them so, end it, and move the "
        "storage's folder SYSTEM_IDENTIFIER/ into the new storage: it is the only record of what was delivered",
    )


def _probe(root: Location) -> None:
    """Write a file and remove it again; a local root that is not there yet is not made."""
    if root.is_local:
        folder = root.uri
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"check")
        return
    import pyarrow.parquet as pq
    from deltalake.fs import DeltaStorageHandler

    handler = DeltaStorageHandler(root.uri, root.storage_options)
    # Parquet, as the sink writes: what `write` of such a stream passes on, deltalake does not take.
    with handler.open_output_stream(_PROBE) as stream:
        pq.write_table(pa.table({"check": [True]}), stream)
    handler.delete_file(_PROBE)


def check_tables(
    root: LogTables, server: ServerSide | None, slots: Callable[[], Sequence[str]] = lambda: ()
) -> list[Finding]:
    """The tables against the server, by the rules that the sink follows. ``slots``: the application ids of
    ``_transactions``. Raises what opening a table raises."""
    from xidstream.pipeline.log_tables.ownership import Ownership

    named = [(locations.TRANSACTIONS, locations.TRANSACTIONS), (locations.MESSAGES, locations.MESSAGES)]
    tables = () if server is None else server.tables
    named += [(root.key_of(*name), table_label(*name)) for name in tables[:MOST_TABLES]]

    def opened(one: tuple[str, str]) -> LogTableWriter | None:
        return root.open(*one)

    with ThreadPoolExecutor(_THREADS) as threads:
        found = [writer for writer in threads.map(opened, named) if writer is not None]
    if server is None:
        return [
            Finding.not_checked("sink_tables", "the sink's tables: there is no server to compare them with")
        ]
    application_id = server.identity.application_id
    ownership = Ownership(application_id, f"{application_id}/messages", root.root, server.tenure())
    for writer in found:
        ownership.check(writer)
    findings = [Finding.ok("sink_tables", _holdings_text(found, application_id))]
    own = next((writer for writer in found if writer.label == locations.TRANSACTIONS), None)
    if own is not None:
        ownership.check_server(own, slots)
    owner = 0 if own is None else Ownership.owner_of(own, application_id)
    findings += server.compare(owner, Lsn(0 if own is None else own.watermark(application_id)))
    if len(tables) > MOST_TABLES:
        findings.append(
            Finding.not_checked(
                "sink_more_tables",
                f"{len(tables) - MOST_TABLES} more of the sink's tables: the sink looks at each when it opens it",
            )
        )
    return findings


def _holdings_text(writers: Sequence[Any], application_id: str) -> str:
    held = {writer.label: writer.watermark(application_id) for writer in writers}
    last = held.get(locations.TRANSACTIONS, 0)
    n = len(held.keys() - {locations.TRANSACTIONS, locations.MESSAGES})
    if not last:
        return f"the sink holds nothing of this slot; {n} of the published tables are there"
    return f"the sink's {n} tables fit this server: they hold this slot's transactions up to {Lsn(last)}"


def _reason(error: BaseException) -> str:
    known = known_reason(error) or type(error).__name__
    return f"{known} ({error.filename})" if isinstance(error, OSError) and error.filename else known
