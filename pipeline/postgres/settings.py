"""The settings of the reader of one slot, validated before anything is connected.

``SlotSettings`` is a value that crosses to the reader's process. Its ``repr`` hides the DSN. The connection and the
preflight take it as their argument. ``pg_rules`` says what PostgreSQL allows. Rules that depend on the server's version
are in ``stream_options``, because the version is known only after connecting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.pg_rules import (
    Streaming,
    check_publication_names,
    check_slot_name,
    check_stream_options,
    work_mem,
)
from xidstream.pipeline.postgres.conninfo import parse
from xidstream.pipeline.postgres.login import Login


@dataclass(frozen=True)
class SlotSettings:
    """The settings of one replication connection.

    dsn: a libpq conninfo or URI. libpq takes the parts that it leaves out from ``PG*`` variables, the service file and
        the passfile. Default empty: everything comes from there.
    password_command: program and arguments; what it writes is the password of each connection. Default: none.
    slot, publications: names as in the catalogs, neither quoted nor folded to lower case.
    streaming: default ON, the purpose of this project. It falls back to OFF if server or protocol has no streaming.
    proto_version: a cap, 1 to 4. Default None: the highest that both sides have.
    logical_decoding_work_mem: for the reader's own session, with a unit (kB, MB, GB), at least 64kB.
        None or ``server`` leaves the server's. Default 4MB: any size drains equally fast, and at most this
        much is left to send after a COMMIT.
    two_phase: ask for prepared transactions at PREPARE (PostgreSQL 15). It marks the slot for good.
    failover: have standbys synchronise the slot (PostgreSQL 17). It marks the slot for good.
    heartbeat_interval_s: how often a heartbeat is to be written; 0: never.
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
    failover: bool = False
    heartbeat_interval_s: float = 0.0
    query_timeout_s: float = 60.0
    password_command: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        parse(self.dsn)
        Login(self.dsn, self.password_command)
        check_slot_name(self.slot)
        if not self.publications:
            raise ConfigError(
                "no publication is given",
                remedy="name at least one: publication, or --publication on the command line",
            )
        check_publication_names(self.publications)
        check_stream_options(self.streaming, self.proto_version, two_phase=self.two_phase)
        if self.query_timeout_s <= 0:
            raise ConfigError(f"query_timeout_s must be more than 0, not {self.query_timeout_s}")
        object.__setattr__(self, "logical_decoding_work_mem", work_mem(self.logical_decoding_work_mem))

    @property
    def login(self) -> Login:
        return Login(self.dsn, self.password_command)
