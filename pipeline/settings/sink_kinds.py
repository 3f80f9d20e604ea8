"""The kinds of sink, and what each can do: the one list of them.

The setting ``sink`` is a kind's name, and after a colon what it writes to. Whoever has to know what a sink can do asks
its kind, in any process and before there is a sink: the reader, the preflight, the command line. How a sink is made
says ``implementation`` (``pipeline.sinks.sink.SinkType``), which is imported where it is needed and no earlier.

A new sink is a folder of its own and one entry of ``KINDS``. ``tests/spark/sink_contract`` has such a one.

Rejected: a list beside the implementations. ``config`` is below them, and needs to know which sinks are folders.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final


class Snapshots(enum.Enum):
    """How a sink gets the rows that tables had before their stream."""

    NONE = enum.auto()
    """Not at all."""
    FIRST = enum.auto()
    """Snapshots are batches ahead of all others. The changes that they contain are left out behind them."""
    BESIDE = enum.auto()
    """Beside the batches: readers write files, and the sink commits them."""


@dataclass(frozen=True)
class SinkKind:
    """``argument``: what comes after the colon, as help shows it; empty where nothing does. ``names``: what that is,
    in a word. ``has_root``: it is a folder or a URI; with ``knows_names`` it may also begin with a name that somebody
    else's configuration explains. ``is_log``: the sink keeps what it was given, and knows up to which commit and by
    whom. ``has_states``: states and changes are read from that log (``ChangeLog``), and ``verify`` compares them.
    ``has_base_tables``: base tables are made beside it. ``erases_keys``: keys are erased from both. ``carries_rows``:
    repairs carry its rows over. ``orders_rows``: where it makes one file of many, it orders the rows (``log_layout``).
    ``rewrites_versions``: a commit writes anew what a base table knows of its former versions.
    ``needs_spark``: each batch asks for the Spark session; else only a batch does that is too much for the driver's own
    process. ``runs_users_code``: the sink hands rows to a function of the user. ``implementation``:
    ``module:class``."""

    name: str
    implementation: str
    argument: str = ""
    names: str = ""
    has_root: bool = False
    knows_names: bool = False
    is_log: bool = False
    has_states: bool = False
    has_base_tables: bool = False
    erases_keys: bool = False
    carries_rows: bool = False
    orders_rows: bool = False
    rewrites_versions: bool = False
    needs_spark: bool = True
    runs_users_code: bool = False
    snapshots: Snapshots = Snapshots.NONE

    def is_folder_or_uri(self, argument: str) -> bool:
        """Whether an argument of this kind is a folder or a URI."""
        return self.has_root and (not self.knows_names or _ADDRESS.match(argument) is not None)

    @property
    def form(self) -> str:
        return self.spec(self.argument)

    def spec(self, argument: str) -> str:
        """The setting ``sink`` that names this kind with its argument."""
        return f"{self.name}:{argument}" if argument else self.name


_ADDRESS: Final = re.compile(r"[/~]|\.{1,2}/|[A-Za-z][A-Za-z0-9+.-]*:")
_TYPES: Final = "xidstream.pipeline.sinks.sink_types"
DELTA: Final = SinkKind(
    "delta",
    f"{_TYPES}:DeltaType",
    "URI",
    "folder",
    has_root=True,
    is_log=True,
    has_states=True,
    has_base_tables=True,
    erases_keys=True,
    carries_rows=True,
    orders_rows=True,
    needs_spark=False,
    snapshots=Snapshots.BESIDE,
)
ICEBERG: Final = SinkKind(
    "iceberg",
    f"{_TYPES}:IcebergType",
    "CATALOG/namespace",
    "catalog and namespace",
    has_root=True,
    knows_names=True,
    is_log=True,
    has_states=True,
    has_base_tables=True,
    erases_keys=True,
    rewrites_versions=True,
    needs_spark=False,
    snapshots=Snapshots.BESIDE,
)
CONSOLE: Final = SinkKind("console", f"{_TYPES}:ConsoleType")
FOREACH: Final = SinkKind(
    "foreach",
    f"{_TYPES}:ForeachType",
    "module:function",
    "function",
    runs_users_code=True,
    snapshots=Snapshots.FIRST,
)

KINDS: Final = {kind.name: kind for kind in (DELTA, ICEBERG, CONSOLE, FOREACH)}


def kind_named(spec: str) -> SinkKind | None:
    """The kind of the setting ``sink``. None where it names none, and may be wrong (``parse_sink_spec``)."""
    return KINDS.get(spec.partition(":")[0])


def kind_of(spec: str) -> SinkKind:
    """The kind of a setting that was checked. A function that a script holds is no setting, and is ``FOREACH``."""
    return kind_named(spec) or FOREACH
