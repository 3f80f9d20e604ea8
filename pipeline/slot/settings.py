"""The settings of the reader of one slot, validated before anything is connected.

``SlotSettings`` is a value that crosses to the reader's process. Its ``repr`` hides the DSN. The connection and the
preflight take it as their argument. Rules that depend on the server's version are in ``stream_options``, because the
version is known only after connecting.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Final

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.slot.conninfo import parse

SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
"""The names that PostgreSQL allows (ReplicationSlotValidateName in slot.c)."""

_MEMORY: Final = re.compile(r"([0-9]{1,10}) ?(kB|MB|GB)")
_UNITS_KB: Final = {"kB": 1, "MB": 1024, "GB": 1024 * 1024}
_MIN_WORK_MEM_KB: Final = 64
_MAX_WORK_MEM_KB: Final = (1 << 31) - 1
HIGHEST_PROTO_VERSION: Final = 4


class Streaming(enum.Enum):
    """The ``streaming`` option of pgoutput."""

    OFF = "off"  # a transaction is sent after its commit
    ON = "on"  # a large transaction is sent while it is open
    PARALLEL = "parallel"  # as on; aborts carry an LSN and a timestamp (protocol 4, PostgreSQL 16)


class Origin(enum.Enum):
    """The ``origin`` option of pgoutput (PostgreSQL 16)."""

    ANY = "any"
    NONE = "none"  # only changes that were made at this server, none that were replicated to it


@dataclass(frozen=True)
class SlotSettings:
    """The settings of one replication connection.

    dsn: a libpq conninfo or URI. libpq takes the parts that it leaves out from ``PG*`` variables, the service file and
        the passfile. Default empty: everything comes from there.
    slot, publications: names as in the catalogs, neither quoted nor folded to lower case.
    streaming: default ON, the purpose of this project. It falls back to OFF if server or protocol has no streaming.
    proto_version: a cap, 1 to 4. Default None: the highest that both sides have.
    logical_decoding_work_mem: for the reader's own session, with a unit (kB, MB, GB), at least 64kB.
        None or ``server`` leaves the server's. Default 4MB: any size drains equally fast, and at most this
        much is left to send after a COMMIT.
    two_phase: ask for prepared transactions at PREPARE (PostgreSQL 15). It marks the slot for good.
    origin: default ANY, which is PostgreSQL's default.
    query_timeout_s: how long an answer to a replication command may take. Default 60: a server answers these at
        once, and only a server that is gone needs longer. (Creating a slot is not bound by it.)

    Raises ConfigError.
    """

    dsn: str = field(repr=False)
    slot: str
    publications: tuple[str, ...]
    streaming: Streaming = Streaming.ON
    proto_version: int | None = None
    logical_decoding_work_mem: str | None = "4MB"
    two_phase: bool = False
    origin: Origin = Origin.ANY
    query_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        parse(self.dsn)
        check_slot_name(self.slot)
        if not self.publications:
            raise ConfigError("no publication is given", remedy="name at least one with --publication")
        for name in self.publications:
            if not name or "\0" in name or len(name.encode()) > 63:
                raise ConfigError(f"not a publication's name (1 to 63 bytes): {name!r}")
        if len(set(self.publications)) != len(self.publications):
            raise ConfigError(f"a publication is named twice: {', '.join(self.publications)}")
        if self.proto_version is not None and not 1 <= self.proto_version <= HIGHEST_PROTO_VERSION:
            raise ConfigError(f"proto_version is 1 to {HIGHEST_PROTO_VERSION}, not {self.proto_version}")
        if self.streaming is Streaming.PARALLEL and self.proto_version not in (None, 4):
            raise ConfigError(f"streaming=parallel needs protocol 4, not {self.proto_version}")
        if self.two_phase and self.proto_version is not None and self.proto_version < 3:
            raise ConfigError(f"two_phase needs protocol 3 or 4, not {self.proto_version}")
        if self.query_timeout_s <= 0:
            raise ConfigError(f"query_timeout_s must be more than 0, not {self.query_timeout_s}")
        object.__setattr__(self, "logical_decoding_work_mem", _work_mem(self.logical_decoding_work_mem))


def check_slot_name(name: str) -> None:
    """Raise ConfigError unless PostgreSQL allows the name."""
    if SLOT_NAME.fullmatch(name) is None:
        raise ConfigError(f"not a slot's name: {name!r}", remedy="use 1 to 63 of a-z, 0-9 and _")


def _work_mem(text: str | None) -> str | None:
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
