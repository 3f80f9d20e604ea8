"""A standby of an embedded server, which synchronises its failover slots."""

from __future__ import annotations

import os
import shutil
import subprocess

import psycopg

from tests.postgres_fixtures import FAST
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

PHYSICAL_SLOT = "standby"


def standby_of(primary: EmbeddedPostgres) -> EmbeddedPostgres:
    """Not started. Its data is beside the primary's, which goes on."""
    with psycopg.connect(primary.conninfo(), autocommit=True) as admin:
        admin.execute("select pg_create_physical_replication_slot(%s, true)", (PHYSICAL_SLOT,))
    data = primary.data_dir.with_name("standby")
    copy = [primary.bin("pg_basebackup"), "-d", primary.conninfo(), "-D", data, "-c", "fast", "--no-sync"]
    subprocess.run(copy, check=True, env={k: v for k, v in os.environ.items() if not k.startswith("PG")})
    (data / "standby.signal").touch()
    owner = primary.data_dir.stat()
    for folder, _, files in os.walk(data):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            shutil.chown(path, owner.st_uid, owner.st_gid)
    settings = {
        "primary_conninfo": primary.conninfo(),  # with the database's name, which the synchronisation needs
        "primary_slot_name": PHYSICAL_SLOT,
        "hot_standby_feedback": "on",
        "sync_replication_slots": "on",
    }
    return EmbeddedPostgres(data, version=primary.version, settings={**FAST, **settings})
