"""What PostgreSQL allows in the names and values that people give: each rule once, before anything is connected.

``pipeline.settings.config`` checks a run's settings by these rules when they are read, ``pipeline.postgres`` what it
puts into a command, and ``pipeline.storage`` what becomes part of a key. What depends on the server's version is known
only once connected, and is in ``pipeline.postgres.stream_options``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from xidstream.pipeline.errors import ConfigError

_QUOTED: Final = re.compile(r'"(?:[^"]|"")+"', re.DOTALL)
_LABEL: Final = re.compile(r'("(?:[^"]|"")+"|[^.]+)\.(.+)', re.DOTALL)
_LABELLED_COLUMN: Final = re.compile(r'((?:"(?:[^"]|"")+"|[^.]+)\.(?:"(?:[^"]|"")+"|[^.]+))\.(.+)', re.DOTALL)
_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
"""ReplicationSlotValidateName in slot.c."""
_NAME_BYTES: Final = 63
"""NAMEDATALEN - 1."""
_MEMORY: Final = re.compile(r"([0-9]{1,10}) ?(kB|MB|GB)")
_UNITS_KB: Final = {"kB": 1, "MB": 1024, "GB": 1024 * 1024}
_MIN_WORK_MEM_KB: Final = 64
_MAX_WORK_MEM_KB: Final = (1 << 31) - 1
_HIGHEST_PROTO_VERSION: Final = 4
HEARTBEAT_PREFIX: Final = b"xidstream"
"""The prefix of logical messages that are our own heartbeats, of whatever slot: no sink gets them."""
DDL_PREFIX: Final = "xidstream.ddl"
"""The prefix of transactional messages that tell of DDL (``postgres.ddl_trigger``): no table of messages has them, and
no function gets them."""


class Streaming(enum.Enum):
    """The ``streaming`` option of pgoutput."""

    OFF = "off"  # a transaction is sent after its commit
    ON = "on"  # a large transaction is sent while it is open
    PARALLEL = "parallel"  # as on; aborts carry an LSN and a timestamp (protocol 4, PostgreSQL 16)


def check_slot_name(name: str) -> None:
    """Raise ConfigError unless PostgreSQL allows the name of a slot."""
    if _SLOT_NAME.fullmatch(name) is None:
        raise ConfigError(f"not a slot's name: {name!r}", remedy="use 1 to 63 of a-z, 0-9 and _")


def check_publication_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless each can be a publication's, and none comes twice. PostgreSQL cuts a longer one off."""
    for name in names:
        if not name or "\0" in name or len(name.encode(errors="surrogatepass")) > _NAME_BYTES:
            raise ConfigError(f"not a publication's name (1 to {_NAME_BYTES} bytes): {name!r}")
    if len(set(names)) != len(names):
        raise ConfigError(f"a publication is named twice: {', '.join(names)}")


def check_stream_options(streaming: Streaming, proto_version: int | None, *, two_phase: bool) -> None:
    """Raise ConfigError if the protocol version does not exist, or lacks what is asked for. None: any version."""
    if proto_version is None:
        return
    if not 1 <= proto_version <= _HIGHEST_PROTO_VERSION:
        raise ConfigError(f"proto_version is 1 to {_HIGHEST_PROTO_VERSION}, not {proto_version}")
    if streaming is Streaming.PARALLEL and proto_version < 4:
        raise ConfigError(f"streaming=parallel needs protocol 4, not {proto_version}")
    if two_phase and proto_version < 3:
        raise ConfigError(f"two_phase needs protocol 3 or 4, not {proto_version}")


def work_mem(text: str | None) -> str | None:
    """A value of ``logical_decoding_work_mem`` as SET takes it; None, the server's own, for None and ``server``.

    Raises ConfigError for what is no size with a unit (kB, MB, GB), or out of PostgreSQL's range.
    """
    if text is None or text == "server":
        return None
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"logical_decoding_work_mem: not a size: {text!r}", remedy="for example 4MB, 64kB or server"
        )
    if not _MIN_WORK_MEM_KB <= int(match[1]) * _UNITS_KB[match[2]] <= _MAX_WORK_MEM_KB:
        raise ConfigError(f"logical_decoding_work_mem is at least 64kB and less than 2048GB, not {text}")
    return match[1] + match[2]


def table_label(schema: str, table: str) -> str:
    """``schema.table``, as users read and write it; not an SQL identifier. One label is one table's alone.

    A name is quoted, as PostgreSQL quotes it, only where the label could be read as another table's: where it has a dot
    in it, or begins with a quote. (Labels are stored, so all others stay as they were.)
    """
    return f"{_label_part(schema)}.{_label_part(table)}"


def labelled_table(label: str) -> tuple[str, str] | None:
    """``(schema, table)`` of a label; None where it is none. Of names that should be quoted and are not, the first dot
    ends the schema."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    schema, table = (
        part[1:-1].replace('""', '"') if _QUOTED.fullmatch(part) else part for part in match.groups()
    )
    return (schema, table) if schema and table else None


ColumnNames = Mapping[tuple[str, str], Mapping[str, str]]
"""By schema and table: a column's name in PostgreSQL → the one under which it is delivered."""


def renamed_columns(entries: Iterable[str]) -> ColumnNames:
    """Read ``schema.table.column=name``; schema and table are quoted as in a label, column and name are not. Raises
    ConfigError."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        named, _, name = entry.rpartition("=")
        match = _LABELLED_COLUMN.fullmatch(named)
        table = None if match is None else labelled_table(match[1])
        if match is None or table is None or not name:
            raise ConfigError(
                f"column_names: {entry!r} is no column and its new name",
                remedy="such as public.orders._xid=source_xid",
            )
        if match[2] in found.setdefault(table, {}):
            raise ConfigError(f"column_names: column {named} is named twice")
        found[table][match[2]] = name
    return found


def _label_part(name: str) -> str:
    if "." in name or name.startswith('"'):
        return '"' + name.replace('"', '""') + '"'
    return name
