"""The password of the DSN is in the reader's process and nowhere else: not in Ray's memory, logs, storage or texts."""

from __future__ import annotations

import errno
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from psycopg import sql

from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.ray.conftest import RayPipeline
from tests.ray.test_pipeline import NEWEST, set_up
from tests.ray.test_storage_faults import deliver_one
from xidstream.actors.runtime import secrets as runtime_secrets
from xidstream.actors.runtime.hidden_variables import hidden_from_children
from xidstream.actors.runtime.ray_cluster import temporary_folder
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.runtime.secrets import ReaderSecrets, refuse_travelling, take_up
from xidstream.pipeline.errors import Action, ComponentLost, ConfigError, EnvironmentFault
from xidstream.pipeline.settings.config import Config

pytestmark = pytest.mark.ray

_MAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ \S+\s*(.*)")


@pytest.fixture
def role(database: Database) -> Iterator[tuple[str, str]]:
    name, password = f"reader_of_{database.name}", secrets.token_hex(16)
    quoted = sql.Identifier(name)
    database.connection.execute(
        sql.SQL("create role {} login replication password {}").format(quoted, sql.Literal(password))
    )
    yield name, password
    database.connection.execute(sql.SQL("drop role {}").format(quoted))


@pytest.mark.slow
@NEWEST
def test_the_password_is_in_no_other_process_and_in_no_file(
    pipeline: RayPipeline, role: tuple[str, str]
) -> None:
    user, password = role
    set_up(pipeline.database)
    temporary = Path(temporary_folder() or "")
    supervisor = pipeline.start(dsn=pipeline.database.dsn(over_tcp=True, user=user, password=password))
    deliver_one(pipeline, 1)
    reader = supervisor.pids[0]
    others = [
        p
        for p in living_below()
        if p.process.pid != reader and (p.name in ("gcs_server", "raylet") or p.name.startswith("ray::"))
    ]
    names = {p.name for p in others}
    assert {"gcs_server", "raylet"} <= names
    secret, known = password.encode(), pipeline.slot.encode()
    found = {p.name: memory_has(p.process.pid, secret, known) for p in others}
    assert found["gcs_server"][1], "the arguments of actors are looked for at the right place"
    assert not [name for name, (has_secret, _) in found.items() if has_secret], found
    logs = [f for f in Path(session_folder()).rglob("*") if f.is_file() and os.access(f, os.R_OK)]
    assert logs and not [f for f in logs if secret in f.read_bytes()]
    assert not [f for f in pipeline.storage.rglob("*") if f.is_file() and secret in f.read_bytes()]
    texts = [repr(supervisor.__dict__), repr(supervisor.status()), *pipeline.notices]
    assert not [t for t in texts if password in t]
    psutil.Process(reader).kill()
    deliver_one(pipeline, 2)  # another reader gets it again
    assert temporary.is_dir()
    assert list(temporary.glob("xidstream-*")) == [], "each took the file away"


def test_a_password_is_refused_where_ray_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xidstream.actors.runtime.secrets.is_ours", lambda: False)
    for dsn in ("host=db password=hunter2", "postgresql://me:hunter2@db/x", "host=db sslpassword=hunter2"):
        with pytest.raises(ConfigError) as caught:
            refuse_travelling(Config(dsn=dsn))
        assert "hunter2" not in caught.value.message + caught.value.remedy
        assert "passfile" in caught.value.remedy
    refuse_travelling(Config(dsn="host=db user=me passfile=/etc/pgpass"))


def test_what_a_reader_takes_up_is_for_this_user_alone_and_then_gone() -> None:
    config = Config(dsn="host=db user=me password='a b\\'c' dbname=x")
    given = ReaderSecrets(config)
    path = given.lay_down()
    assert path is not None
    assert os.stat(path).st_mode & 0o777 == 0o600 and os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    bare = Config(dsn="host=db user=me dbname=x")
    assert "password='a b\\'c'" in take_up(bare, path).dsn
    assert not os.path.exists(os.path.dirname(path))
    with pytest.raises(EnvironmentFault):
        take_up(bare, path)
    second = given.lay_down()
    given.remove()
    assert second is not None and not os.path.exists(second)
    assert ReaderSecrets(bare).lay_down() is None


def test_a_password_of_the_environment_goes_to_the_reader_and_into_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    bare = Config(dsn="service=shop")
    given = ReaderSecrets(bare)
    assert "hunter2" not in repr(given)
    path = given.lay_down()
    monkeypatch.delenv("PGPASSWORD")
    assert take_up(bare, path).dsn == "service=shop", "a service file's password ranks before it"
    assert os.environ.pop("PGPASSWORD") == "hunter2"


def test_children_that_are_started_with_ray_do_not_inherit_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("PGPASSFILE", "/etc/pgpass")
    with hidden_from_children():
        assert b"hunter2" not in subprocess.check_output(["env"])
        assert os.environ["PGPASSFILE"] == "/etc/pgpass"
    assert os.environ["PGPASSWORD"] == "hunter2"


def test_a_password_that_cannot_be_laid_down_is_an_error_that_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ReaderSecrets(Config(dsn="host=db password=hunter2"))
    monkeypatch.setattr(runtime_secrets, "temporary_folder", lambda: str(tmp_path / "gone"))
    with pytest.raises(EnvironmentFault, match="the file with the password cannot be written") as raised:
        given.lay_down()
    assert raised.value.policy.action is Action.RESTART
    (tmp_path / "gone").mkdir()
    assert given.lay_down() is not None
    given.remove()
    # Room for a folder, and none for the file.
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(EnvironmentFault):
        given.lay_down()
    assert list((tmp_path / "gone").iterdir()) == []


def full(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_control_store_that_goes_away_is_a_lost_part() -> None:
    error = ray.exceptions.RpcError("failed to connect to GCS", rpc_code=14)
    assert isinstance(unwrap(error, "slot reader"), ComponentLost)


def test_a_ray_of_this_process_is_told_from_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_travelling(Config(dsn="password=hunter2"))
    node = ray._private.worker._global_node
    monkeypatch.setattr(node, "head", False)
    with pytest.raises(ConfigError):
        refuse_travelling(Config(dsn="password=hunter2"))


def test_whoever_has_no_token_is_refused_and_a_dashboard_is_on_loopback() -> None:
    script = (
        "import sys; from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1])\n"
        "print('keys:', len(client.internal_kv_keys(b'', None, timeout=10)))"
    )
    address = ray._private.worker._global_node.gcs_address

    def ask(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, address],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    assert "keys:" in ask(RAY_AUTH_MODE="token").stdout
    refused = ask(RAY_AUTH_MODE="disabled")
    assert "keys:" not in refused.stdout and "auth" in refused.stderr.lower(), refused
    commands = [" ".join(p.command) for p in living_below()]
    # Ray starts the process also without a dashboard, for its usage statistics.
    dashboards = [c for c in commands if "dashboard/dashboard.py" in c]
    assert all("--host=127.0.0.1" in c for c in dashboards), dashboards


def session_folder() -> str:
    return str(ray._private.worker._global_node.get_session_dir_path())


def memory_has(pid: int, *needles: bytes) -> list[bool]:
    """Whether a process' private memory holds each; a mapping that cannot be read counts as empty."""
    found = [False] * len(needles)
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            match = _MAP.match(line)
            if match is None or match[3].startswith("/") or match[3].startswith("[v"):
                continue
            first, end = int(match[1], 16), int(match[2], 16)
            try:
                memory.seek(first)
                content = memory.read(end - first)
            except (OSError, OverflowError, ValueError):
                continue
            found = [f or n in content for f, n in zip(found, needles, strict=True)]
    return found
