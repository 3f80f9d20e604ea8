"""The secret that the parts of RayDP's Spark ask each other for (``spark.authenticate``).

RayDP starts JVMs on any node, and gives them Spark's settings as arguments, where everybody on the node could read a
secret. So it takes another way, which Spark has for this:

- *On a Ray of the run's own* it is made for the session, and is in a file of Hadoop's credentials, mode 0600, in the
  run's folder. The JVMs get the file's path, and Hadoop's library reads it for Spark.
- *On a cluster* the nodes must have it, as they have Ray's token: as the variable ``_SPARK_AUTH_SECRET``, Spark's own,
  in the environment of ``ray start``. Where it is missing, Spark asks for nothing.

The driver's JVM is told through PySpark's gateway, because Spark demands the secret among its settings there.

Rejected: the environment of Ray's actors (``runtime_env``), because Ray writes it to its logs; for the run's own Ray
the variable, because each process would inherit it, and what a user's function starts.

``session`` calls this module.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from xidstream.actors.runtime.ray_cluster import temporary_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUTHENTICATE: Final = "spark.authenticate"
SECRET_VARIABLE: Final = "_SPARK_AUTH_SECRET"
"""SecurityManager.ENV_AUTH_SECRET."""
_ALIAS: Final = b"sparkCookie"
"""SecurityManager.SECRET_LOOKUP_KEY."""
_MAGIC: Final = b"HDTS\0"
"""Hadoop's Credentials.TOKEN_STORAGE_MAGIC, and the version of the form that Writable has."""
_NO_TOKENS, _ONE_KEY = b"\0", b"\1"


@dataclass(frozen=True)
class SparkSecret:
    """``java_option``: what the JVMs but the driver's need beside their environment; empty for nothing."""

    value: str = field(repr=False)
    java_option: str

    def added_to(self, conf: Mapping[str, str]) -> dict[str, str]:
        """RayDP's settings, with what makes all its JVMs use the secret. What the user set stays."""
        # Between machines the connections are encrypted, too.
        found = {
            AUTHENTICATE: "true",
            "spark.network.crypto.enabled": str(not self.java_option).lower(),
            **conf,
        }
        if self.java_option:
            for key in ("spark.executor.extraJavaOptions", "spark.ray.raydp_app_master.extraJavaOptions"):
                found[key] = f"{self.java_option} {found.get(key, '')}".strip()
        return found

    @property
    def of_driver(self) -> dict[str, str]:
        """Properties of the driver's JVM."""
        return {"spark.authenticate.secret": self.value}


def spark_secret() -> SparkSecret | None:
    """That of the session which this process is about to start; None on a cluster that has none.

    Raises OSError where the file cannot be written."""
    folder, given = temporary_folder(), os.environ.get(SECRET_VARIABLE)
    if folder is None or given:  # all JVMs have the variable, and Spark prefers it
        return SparkSecret(given, "") if given else None
    value = secrets.token_hex(32)
    path = os.path.join(folder, f"spark-{secrets.token_hex(4)}.credentials")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(_MAGIC + _NO_TOKENS + _ONE_KEY + _counted(_ALIAS) + _counted(value.encode()))
    return SparkSecret(value, shlex.quote(f"-Dhadoop.token.files={path}"))


def _counted(text: bytes) -> bytes:
    """A VInt of Hadoop's, which is one byte up to 127, and the bytes."""
    assert len(text) < 128
    return bytes([len(text)]) + text


def name_application(spark: SparkSession) -> None:
    """Give the driver's block manager the application's id that RayDP's executors have.

    RayDP's scheduler keeps the id that its master gave the application to itself, so that Spark makes up another for
    the driver. A block manager gives blocks only to whom has its own id, once connections are authenticated: no
    executor could read what a task consists of. Before the first job.
    """
    context = spark.sparkContext._jsc.sc()
    backend = context.schedulerBackend()
    # A name of Scala's for a private field: each class above has one of its own.
    app_id = getattr(backend, f"{backend.getClass().getName().replace('.', '$')}$$appId")().get()
    service = context.env().blockManager().blockTransferService()
    server = _field(_field(service, "transportContext"), "rpcHandler")
    for holder in (server, *_field(_field(service, "clientFactory"), "clientBootstraps")):
        _find(holder, "appId").set(holder, app_id)


def _field(owner: Any, name: str) -> Any:
    return _find(owner, name).get(owner)


def _find(owner: Any, name: str) -> Any:
    """A private field, of the object's class or one above it."""
    of = owner.getClass()
    while name not in (fields := {each.getName(): each for each in of.getDeclaredFields()}):
        of = of.getSuperclass()
    fields[name].setAccessible(True)
    return fields[name]
