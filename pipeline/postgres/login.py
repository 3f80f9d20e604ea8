"""How a session gets in: the DSN, and the program that gives its password, if there is one.

A DSN alone says all that libpq needs, and so it is enough wherever nobody has a ``password_command``. libpq has no such
option, so the program travels beside the DSN, to the moment of each connection: a token may live for minutes only.

Rejected: the password in the DSN, once for a process, because a connection that is made hours later would be refused;
and PGPASSWORD in the environment, because children inherit it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.postgres.conninfo import complete, parse
from xidstream.pipeline.settings.config import Config


@dataclass(frozen=True)
class Login:
    """``dsn``: libpq's. ``password_command``: program and arguments; empty where libpq finds what it needs."""

    dsn: str = field(repr=False)
    password_command: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.password_command and "password" in parse(self.dsn):
            raise ConfigError(
                "the dsn has a password, and password_command gives another", remedy="leave one of them out"
            )

    @classmethod
    def of(cls, dsn: Dsn) -> Login:
        return dsn if isinstance(dsn, Login) else cls(dsn)

    def to(self, **options: str) -> Login:
        """This login with other options of libpq: another host, another time limit."""
        return replace(self, dsn=complete(self.dsn, **options))


Dsn: TypeAlias = "Login | str"
"""The argument of functions that connect."""


def login_of(config: Config) -> Login:
    return Login(config.dsn, config.password_command)
