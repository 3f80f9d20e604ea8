"""How the DSN's password reaches the reader, which alone needs it, without being an actor's argument.

Ray keeps the arguments with which an actor was made in its control store and on the wire between nodes. So the
configuration that travels has a DSN without secrets, and they go another way, or no way at all:

- A Ray that this process started is on this machine alone. The secrets lie in a file of mode 0600 in a private
  folder from just before a reader starts until it has read them, a second or two; the reader removes the file.
- Any other Ray is refused (ConfigError). There the reader's node has to know by itself what libpq looks for:
  a passfile, a service file, ``PG*`` variables. (A password in the driver's DSN was then in the job's entry point,
  too, which Ray's dashboard shows.)

Rejected: ``runtime_env``'s env_vars (the dashboard and the state API show them); PGPASSWORD in the environment of a
local Ray (each Spark executor and the user's code would inherit it; and a script's Ray is there already); libpq's
own passfile (PGPASSWORD and a service file's password would win over it, though the DSN's wins over them).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from contextlib import suppress

from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ConfigError, EnvironmentFault
from xidstream.pipeline.slot.conninfo import join_secrets, split_secrets

_FILE = "dsn.json"


def without_secrets(config: Config) -> Config:
    """What may be an actor's argument. Raises ConfigError for secrets in other settings than the DSN."""
    config.refuse_credentials()
    return dataclasses.replace(config, dsn=split_secrets(config.dsn)[0])


def refuse_travelling(config: Config) -> None:
    """Raise ConfigError where the DSN holds a secret and Ray is not ours alone; before anything is started, too."""
    config.refuse_credentials()
    secrets = split_secrets(config.dsn)[1]
    if secrets and not is_ours():
        raise ConfigError(
            f"the dsn holds a secret ({', '.join(secrets)}), which is not sent through a Ray cluster",
            remedy="leave it out of the dsn; give each node that may run the reader a passfile (~/.pgpass, or "
            "PGPASSFILE), a service file, or PGPASSWORD in the environment of `ray start`",
        )


class ReaderSecrets:
    """The secrets of one configuration, given to one reader after another."""

    def __init__(self, config: Config) -> None:
        self._secrets = split_secrets(config.dsn)[1]
        self._path: str | None = None

    def __repr__(self) -> str:
        return f"ReaderSecrets({len(self._secrets)})"

    def lay_down(self) -> str | None:
        """The path of a new file for the next reader; None when there is nothing secret."""
        self.remove()
        if not self._secrets:
            return None
        # mkdtemp's folder is this user's alone, mode 0700, and so are the reader's process and Ray itself.
        self._path = os.path.join(tempfile.mkdtemp(prefix="xidstream-"), _FILE)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(self._secrets, file)
        return self._path

    def remove(self) -> None:
        """What a reader that never came has left."""
        if self._path is not None:
            _remove(self._path)
            self._path = None


def take_up(config: Config, path: str | None) -> Config:
    """In the reader's process: the configuration with its secrets; the file is gone afterwards."""
    if path is None:
        return config
    try:
        with open(path, encoding="utf-8") as file:
            secrets = json.load(file)
    except OSError as error:
        raise EnvironmentFault(
            f"the reader cannot read what the run laid down for it: {error.strerror}",
            remedy="leave the password out of the dsn, and give it on the reader's node in a passfile",
        ) from None
    _remove(path)
    return dataclasses.replace(config, dsn=join_secrets(config.dsn, secrets))


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    with suppress(FileNotFoundError):
        os.rmdir(os.path.dirname(path))
