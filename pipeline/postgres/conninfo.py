"""The DSN: parsed, completed, shown without secrets. libpq does all the resolving.

A DSN has one of libpq's two forms. libpq takes the parts that it leaves out from ``PG*`` variables, the service file
and the passfile. We only add defaults for keepalives and time limits that nobody set, so that a dead server is noticed.
We never read a secret ourselves, except to keep it out of messages.

libpq itself says which options are secret: those whose ``dispchar`` is ``*`` (PQconninfoOption).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from xidstream.pipeline.errors import ConfigError

APPLICATION_NAME: Final = "xidstream"

_DEFAULTS: Final = {
    "connect_timeout": "10",  # seconds, for each host
    "keepalives_idle": "30",  # seconds without traffic before the first probe
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",  # milliseconds that sent bytes may stay unacknowledged
}
_FROM_ENVIRONMENT: Final = {"connect_timeout": "PGCONNECT_TIMEOUT"}
_SHOWN: Final = ("service", "host", "hostaddr", "port", "dbname", "user")
_HIDDEN: Final = "***"
_UNKNOWN_OPTION: Final = re.compile(r"invalid (?:connection option|URI query parameter:?) \"(.*)\"")
"""How libpq names an option that it does not know."""


def parse(dsn: str) -> dict[str, str]:
    """The options that the DSN itself gives. Raises ConfigError without libpq's text, because that quotes the DSN."""
    not_text = ConfigError("the dsn must be text in UTF-8, without NUL")
    if "\0" in dsn or not _is_utf8(dsn):  # libpq would read up to the NUL
        raise not_text
    try:
        return {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    except UnicodeDecodeError:  # it was percent-encoded
        raise not_text from None
    except psycopg.Error as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        if unknown is not None:
            raise _unknown_option(unknown[1]) from None
        raise ConfigError(
            "the dsn is not a libpq connection string",
            remedy="write it as 'host=… port=… dbname=… user=…' or as postgresql://user@host:port/dbname, "
            "and percent-encode special characters of a URI",
        ) from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unknown_option(name: str) -> ConfigError:
    """Names the option only if it resembles one of libpq's: else it may be the second word of a password."""
    known = [option.keyword.decode() for option in pq.Conninfo.parse(b"")]
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return ConfigError(f"the dsn has an unknown option {name!r}", remedy=f"did you mean {near[0]}?")
    return ConfigError(
        "the dsn has an option that libpq does not know",
        remedy="correct its name, and put a value with spaces between quotes: password='pass word'",
    )


def complete(dsn: str, **options: str) -> str:
    """The DSN with ``options`` over it and our defaults under it.

    Inside libpq, ``fallback_application_name`` yields to every name that the user gives. If a service is named, we
    leave its keepalives alone, because our values would outrank the service file.
    """
    given = parse(dsn)
    defaults = {"fallback_application_name": APPLICATION_NAME}
    if "service" not in given and "PGSERVICE" not in os.environ:
        defaults |= {k: v for k, v in _DEFAULTS.items() if _FROM_ENVIRONMENT.get(k, "") not in os.environ}
    return make_conninfo("", **{**defaults, **given, **options})


def display(dsn: str) -> str:
    """Where the DSN leads, for people: ``host=… port=… dbname=… user=…``, secrets left out.

    Values from ``PG*`` variables are included. Values from a service file are not.
    """
    given = parse(dsn)
    values = {**_defaults(_SHOWN), **given}
    if "host" not in given and "hostaddr" in given:
        values.pop("host", None)
    return " ".join(f"{key}={values[key]}" for key in _SHOWN if values.get(key))


def split_secrets(dsn: str) -> tuple[str, dict[str, str]]:
    """The DSN without its secrets, and the secrets: not those that libpq finds in a passfile, ``PG*`` or a service."""
    given = parse(dsn)
    secrets = {key: given[key] for key in sorted(_secret_names() & given.keys()) if given[key]}
    if not secrets:
        return dsn, {}
    return make_conninfo("", **{key: value for key, value in given.items() if key not in secrets}), secrets


def join_secrets(dsn: str, secrets: dict[str, str]) -> str:
    """The inverse of ``split_secrets``."""
    return make_conninfo("", **{**parse(dsn), **secrets}) if secrets else dsn


def scrub(text: str, dsn: str) -> str:
    """``text`` with every secret of the DSN and of the environment replaced by ``***``."""
    names = _secret_names()
    secrets = {v for k, v in parse(dsn).items() if k in names} | set(_defaults(names).values())
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _defaults(names: Iterable[str]) -> dict[str, str]:
    try:
        options = pq.Conninfo.get_defaults()
    except psycopg.Error:  # e.g. PGSERVICE names no service: the connection itself will say so
        return {}
    wanted = set(names)
    return {
        o.keyword.decode(): o.val.decode(errors="replace")
        for o in options
        if o.val and o.keyword.decode() in wanted
    }


def secret_variables() -> frozenset[str]:
    """The ``PG*`` variables that hold a secret: PGPASSWORD, in all versions of libpq so far."""
    options = pq.Conninfo.parse(b"")
    return frozenset(o.envvar.decode() for o in options if o.dispchar == b"*" and o.envvar)


def _secret_names() -> frozenset[str]:
    return frozenset(o.keyword.decode() for o in pq.Conninfo.parse(b"") if o.dispchar == b"*")
