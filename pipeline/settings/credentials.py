"""What is secret in a URI or among options, and how such a URI is shown to people.

Settings, errors and logs show a URI as ``redacted`` gives it. What travels to Ray's actors or Spark's executors is
refused where it holds a secret (``Config.refuse_credentials``, the sink's ``storage_options``). The rules look at names
and places, never at a value's looks.

Called by ``config`` and by all that names a URI in a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from xidstream.pipeline.errors import ConfigError

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_SECRET: Final = re.compile(r"(?i)secret|password|token|(access|account)[_.]?key|^sig$")
"""Names of secrets: Spark's own rule (spark.redaction.regex), and the names in Azure's URIs."""


def is_secret_name(name: str) -> bool:
    """Whether an option or a part of a query with this name holds a secret."""
    return _SECRET.search(name) is not None


def redacted(uri: str) -> str:
    """A URI, or a setting that ends with one (``delta:s3://…``), for people: without user information and query.

    The whole query is left out, because object stores and their versions differ in which of its keys are secret. A key
    that should have been percent-encoded may hold ``/``, ``?`` and ``@``. If it is then unclear which part is secret,
    only the scheme is shown. A path without a scheme holds no secret and stays as it is.
    """
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return uri
    shown, _, query = uri.partition("?")
    if "@" in query:
        return f"{scheme[0]}***"
    before, _, after = shown.rpartition("@")
    if not before:
        return shown
    prefix, slashes, _ = before.partition("://")
    return f"{prefix}{slashes}{after}" if slashes else f"{scheme[0]}***"


def holds_credentials(uri: str) -> bool:
    """Whether a URI, or a setting that ends with one, has a password in its user part or a secret in its query.

    A name alone is no secret (``abfs://container@account``).
    """
    scheme = _SCHEME.match(uri)
    if scheme is None:
        return False
    path, _, query = uri.partition("?")
    # If a key has an unencoded '?' or '@' in it, the user part is all from the scheme to the last '@'.
    user = (uri if "@" in query else path).rpartition("@")[0].partition("://")[2]
    return ":" in user or any(is_secret_name(part.partition("=")[0]) for part in query.split("&"))


def holds_secret_option(options: Mapping[str, str]) -> bool:
    """Whether the name of an option, such as deltalake's storage options have, is that of a secret."""
    return any(map(is_secret_name, options))


def refuse_in_uris(uris: Mapping[str, str]) -> None:
    """Raise ConfigError for settings, by their names, that travel to actors and executors and hold a secret."""
    for name, uri in uris.items():
        if holds_credentials(uri):
            raise ConfigError(
                f"{name} holds credentials: they would be in the arguments of Ray's actors and Spark's tasks",
                remedy="leave them out of the URI; each node finds its own in the environment (AWS_ACCESS_KEY_ID, "
                "…), in the provider's credentials file, or by the role of the machine",
            )


def refuse_in_spark_conf(spark_conf: Mapping[str, str]) -> None:
    """Refuse secrets among Spark's settings."""
    for key in spark_conf:
        if is_secret_name(key):
            raise ConfigError(
                f"spark_conf: {key} looks like a secret: it would be in the arguments of RayDP's actors",
                remedy="give it to each node in its environment, or in a file of Hadoop's or the provider's",
            )
