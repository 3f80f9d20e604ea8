"""Brings the password of DSN or environment to the reader, the only process that needs it, without an actor's argument.

Ray keeps the arguments of actors in its control store and sends them between nodes. So the configuration that travels
has a DSN without secrets. The secrets take another way, or none:

- A Ray that this process started is on this machine alone. The secrets are in a file of mode 0600 in a private
  folder, from just before a reader starts until it has read them, a second or two. The reader removes the file.
  PGPASSWORD goes the same way, and into the reader's own environment, so that it ranks as libpq ranks it. While Ray
  starts, it is hidden (``hidden_from_children``): else Ray's servers, all workers and the JVMs would inherit it.
- On any other Ray a DSN with a secret is refused (ConfigError). There libpq must find the password on the reader's node
  itself: in a passfile, a service file, or ``PG*`` variables. (A password in the driver's DSN would also be in the
  job's entry point, which Ray's dashboard shows.)

Rejected: ``env_vars`` of ``runtime_env``, because the dashboard and the state API show them; a passfile for libpq,
because PGPASSWORD and a service file's password would win over it, although the DSN's password wins over them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from contextlib import suppress

from xidstream.actors.runtime.hidden_variables import hidden_variables
from xidstream.actors.runtime.ray_cluster import is_ours, temporary_folder
from xidstream.pipeline.errors import ConfigError, EnvironmentFault
from xidstream.pipeline.postgres.conninfo import join_secrets, split_secrets
from xidstream.pipeline.settings.config import Config

_FILE = "dsn.json"


def without_secrets(config: Config) -> Config:
    """The configuration that may be an actor's argument. Raises ConfigError for secrets in settings other than the
    DSN."""
    config.refuse_credentials()
    return dataclasses.replace(config, dsn=split_secrets(config.dsn)[0])


def refuse_travelling(config: Config) -> None:
    """Raise ConfigError if the DSN holds a secret and Ray is not ours alone. It works before anything is started."""
    config.refuse_credentials()
    secrets = split_secrets(config.dsn)[1]
    if secrets and not is_ours():
        raise ConfigError(
            f"the dsn holds a secret ({', '.join(secrets)}), which is not sent through a Ray cluster",
            remedy="leave it out of the dsn; give each node that may run the reader a passfile (~/.pgpass, or "
            "PGPASSFILE), a service file, or PGPASSWORD in the environment of `ray start`",
        )


class ReaderSecrets:
    """The secrets of one configuration and of this process's environment, given to one reader after another."""

    def __init__(self, config: Config) -> None:
        self._secrets = split_secrets(config.dsn)[1]
        self._variables = hidden_variables() if is_ours() else {}
        self._path: str | None = None

    def __repr__(self) -> str:
        return f"ReaderSecrets({len(self._secrets) + len(self._variables)})"

    def lay_down(self) -> str | None:
        """The path of a new file for the next reader; None when there is nothing secret. Raises EnvironmentFault."""
        self.remove()
        if not self._secrets and not self._variables:
            return None
        try:
            # mkdtemp's folder is this user's alone, mode 0700, and so are the reader's process and Ray itself.
            self._path = os.path.join(tempfile.mkdtemp(prefix="xidstream-", dir=temporary_folder()), _FILE)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({"dsn": self._secrets, "variables": self._variables}, file)
        except OSError as error:
            self.remove()
            raise EnvironmentFault(
                f"the file with the password cannot be written for the reader: {error.strerror}",
                remedy="make room in the folder for temporary files, or name another one in TMPDIR",
            ) from None
        return self._path

    def remove(self) -> None:
        """Remove the file if no reader has read it."""
        if self._path is not None:
            _remove(self._path)
            self._path = None


def take_up(config: Config, path: str | None) -> Config:
    """In the reader's process: the configuration with its secrets. Removes the file."""
    if path is None:
        return config
    try:
        with open(path, encoding="utf-8") as file:
            secrets = json.load(file)
    except OSError as error:
        raise EnvironmentFault(
            f"the reader cannot read the file with the password that the run wrote for it: {error.strerror}",
            remedy="leave the password out of the dsn, and give it on the reader's node in a passfile",
        ) from None
    _remove(path)
    os.environ.update(secrets["variables"])
    return dataclasses.replace(config, dsn=join_secrets(config.dsn, secrets["dsn"]))


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    with suppress(FileNotFoundError):
        os.rmdir(os.path.dirname(path))
