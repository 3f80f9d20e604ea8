"""Start Ray on this machine, or join the cluster that the environment names.

The command line, a PySpark script or the demo calls this once, at the beginning of a run. A Ray that was started here
ends with this process, however the process ends, and leaves nothing behind (``actors.runtime.run_folder``).

Ray's processes inherit what is in this process's environment when Ray starts. The variables that are theirs alone are
there only for that moment: a user's script is not to find its TMPDIR changed.

*Nobody outside reaches it.* Each of Ray's processes listens on the loopback address alone if that is its node's, and on
all addresses else. ``ray.init(_node_ip_address="127.0.0.1")`` puts the machine's own address in its place, so that
other nodes could join. Ray leaves that out where it knows that there is one node, as by default on macOS: so it is told
so.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.node import Node

from xidstream.actors.runtime import idle_agent
from xidstream.actors.runtime.hidden_variables import hidden_from_children
from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.nodes import require_own_host_name, require_usable_nodes
from xidstream.actors.runtime.run_folder import (
    ROTATED_BYTES,
    RUN_FOLDER,
    RunFolder,
    make_run_folder,
)
from xidstream.actors.runtime.watchdog import Watchdog
from xidstream.pipeline.errors import EnvironmentFault

LOCAL_OBJECT_STORE_BYTES = 1 << 30
"""Enough for the reader's blocks, a backlog and the batch in hand. Ray's default takes 30 % of the machine's memory."""


_JSON_LOGS = ray.LoggingConfig(encoding="JSON", log_level="WARNING", additional_log_standard_attrs=["name"])
_TOKEN_ENABLED = "Token authentication is enabled for this Ray cluster"
_OWN_RAY = {
    # Statistics of each event loop, each minute: 0.2 GB of logs a day. (-1 has the GCS print them without a pause.)
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_ROTATION_MAX_BYTES": str(ROTATED_BYTES),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # What Ray notes of each call, for a dashboard that is off: 0.35 GB in the GCS after some hours.
    "RAY_task_events_report_interval_ms": "0",
    # There is one node: its address is the loopback one.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
}
"""For a Ray that a run starts for itself. What the user has set counts."""

_HELPERS: Final = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's Node, each of which starts a process that one node has no use for: the autoscaler, the carrier of
workers' output to a driver that wants none, and the server of the dashboard that is off. They took two CPU seconds of a
start, and 0.16 GB."""


_COMMAND_OF: Final = "_build_python_executable_command_memory_profileable"
"""Ray's function that gives the beginning of a helper's command, before its program."""


@dataclass
class _OwnRay:
    """The Ray that this process has started."""

    folder: RunFolder
    watchdog: Watchdog
    pid: int
    has_failed: bool = False


_own: _OwnRay | None = None


def _without_noise(record: logging.LogRecord) -> bool:
    """Ray warns that it asks for a token, as it does by default. That it asks for none is still worth a warning."""
    return not record.getMessage().startswith(_TOKEN_ENABLED)


@hidden_from_children()
def connect_ray(
    *,
    namespace: str = "xidstream",
    json_logs: bool = False,
    needs_spark: bool = True,
    offers_metrics: bool = False,
) -> None:
    """Join the cluster that RAY_ADDRESS or the job names, or else start one on this machine.

    ``json_logs``: the processes of this run's actors log JSON into Ray's files. ``needs_spark``: whether Spark will be
    started on this Ray. ``offers_metrics``: whether a Ray that is started here collects metrics and has an agent that
    offers them. A Ray that is joined does what it was started for.

    Raises EnvironmentFault if Ray does not start or is not there. Raises PreconditionMissing if Spark cannot start
    here, or on a node of the cluster.
    """
    if needs_spark:
        ensure_java()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = is_local()
    if local:
        logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_without_noise)
    if local and needs_spark:
        # On one machine all of Spark stays on the loopback address, even if the host's name is unknown. Its JVMs are
        # children of the raylet and inherit the variable.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        require_own_host_name()
    options: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "configure_logging": False,
        "logging_config": _JSON_LOGS if json_logs else None,
    }
    if local:
        _start_own(options, offers_metrics=offers_metrics)
        return
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises plain Exception where its own processes are too slow to start
        raise _no_ray(error) from error
    require_usable_nodes(needs_spark=needs_spark)


def _start_own(options: dict[str, Any], *, offers_metrics: bool) -> None:
    global _own
    _end_own()  # of a script that has ended its first one
    _keep_token_private()
    folder = make_run_folder()
    own = _own = _OwnRay(folder, Watchdog(folder), os.getpid())
    try:
        with (
            _set(_environment_of_ray(folder)),
            _single_node(),
            _without_helpers(offers_metrics=offers_metrics),
        ):
            ray.init(
                **options,
                include_dashboard=False,
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                _temp_dir=folder.ray,
            )
    except BaseException as error:
        # Also where a person interrupts: half a Ray would stay, until this process ends.
        _own = None
        own.watchdog.end(None)
        folder.release()
        if not isinstance(error, Exception):
            raise
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(
            f"Ray did not start on this machine: {reason}", remedy=f"look at its logs, in {folder.logs}"
        ) from error
    own.watchdog.guard(_server_pids())
    # Ray's own handler was registered earlier, so it runs after this one, and finds nothing to end.
    atexit.register(_end_own)


def _environment_of_ray(folder: RunFolder) -> dict[str, str]:
    given = {name: value for name, value in _OWN_RAY.items() if name not in os.environ}
    return {**given, RUN_FOLDER: folder.path, "TMPDIR": folder.temporary}


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _single_node() -> Iterator[None]:
    """This process's Ray has read the variable when it was imported."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _with_idle_agent(rays: Any) -> Any:
    def command_of(component: str, *arguments: Any, **options: Any) -> Any:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            # Ray puts its own program and the arguments behind.
            return [sys.executable, "-I", "-S", idle_agent.__file__]
        return rays(component, *arguments, **options)

    return command_of


def _is_agent_asked_for_ports() -> bool:
    """Whether this Ray's raylet waits for files with its agent's ports, and says in the agent's command which.

    Ray 2.53 does neither: its nodes have an agent's ports before the agent, and so they would tell of ports that are
    not there.
    """
    return hasattr(ray._raylet, "persist_port")


@contextmanager
def _without_helpers(*, offers_metrics: bool) -> Iterator[None]:
    """Ray has no setting that leaves them out."""

    def leave_out(self: Node, **arguments: Any) -> None: ...

    replaced: list[tuple[Any, str, Any]] = [(Node, name, leave_out) for name in _HELPERS]
    # Asked for the dashboard's packages, Ray imports aiohttp, grpc and opentelemetry into this process. They are there.
    replaced.append((ray_utils, "get_dashboard_dependency_error", lambda: None))
    if not offers_metrics and _is_agent_asked_for_ports():
        replaced.append((services, _COMMAND_OF, _with_idle_agent(getattr(services, _COMMAND_OF, None))))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced if hasattr(owner, name)]
    for owner, name, method in replaced:
        if hasattr(owner, name):
            setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _end_own() -> None:
    """End the Ray that this process has started, and all that it left on the disk. A forked child must not."""
    global _own
    own = _own
    if own is None or own.pid != os.getpid():
        return
    _own = None
    if ray.is_initialized() and _session_folder().startswith(own.folder.ray):
        ray.shutdown()
    own.watchdog.end("failed" if own.has_failed else "done")
    own.folder.release()


def _session_folder() -> str:
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path()) if node is not None else ""


def keep_logs() -> str | None:
    """The run has failed: keep the logs of its processes. Returns where; None where the Ray is not this process's."""
    if _own is None:
        return None
    _own.has_failed = True
    return _own.folder.logs


def run_folder() -> str | None:
    """The folder of the run whose own Ray this process belongs to, or has started; None in a cluster."""
    return os.environ.get(RUN_FOLDER) if _own is None else _own.folder.path


def temporary_folder() -> str | None:
    """Where such a process puts temporary files."""
    folder = run_folder()
    return os.path.join(folder, "t") if folder else None


def _keep_token_private() -> None:
    """The token of Ray's authentication is for this user alone: who has it may run code in any Ray of this user.

    Ray makes the file with the process's umask, so that others could read it. It takes a file that is there.
    """
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or os.environ.get(
        "RAY_AUTH_MODE"
    ) == "disabled":
        return
    with suppress(OSError, RuntimeError):  # no home: Ray says what it makes of that
        path = Path.home() / ".ray" / "auth_token"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)
            return
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))


def join_cluster() -> None:
    """Join the cluster to ask something of it: nothing is started there but a task. Raises EnvironmentFault."""
    if ray.is_initialized():
        return
    try:
        ray.init(
            namespace="xidstream",
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises plain Exception here, too
        raise _no_ray(error) from error


def _no_ray(error: Exception) -> EnvironmentFault:
    reason = str(error).strip().splitlines()[0]
    return EnvironmentFault(
        f"the Ray cluster was not joined: {reason}",
        remedy="check RAY_ADDRESS, and that `ray status` answers there",
    )


def _server_pids() -> list[int]:
    """The process ids of what ``ray.init`` started, the raylet and the GCS, and of their children: agents and workers.

    An agent notices only after a minute that its raylet is gone. It may have written its title over the environment by
    which the watchdog knows what was started in the folder.
    """
    node: Any = ray._private.worker._global_node
    pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
    agents = [child.pid for pid in pids for child in _children(pid)]
    return pids + agents


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children()
    return []


def is_local() -> bool:
    """Whether ``ray.init`` would start a Ray of its own: no address is given, and no ``ray start`` ran on this node.

    Raises EnvironmentFault if RAY_ADDRESS names a Ray that is not there.
    """
    try:
        return ray._private.services.canonicalize_bootstrap_address(None) is None  # type: ignore[arg-type]
    except (ConnectionError, ValueError) as error:  # no Ray is there, or the address is not an address
        raise _no_ray(error) from error


def is_ours() -> bool:
    """Whether Ray is, or would be, one that this process starts for itself, on this machine alone."""
    if not ray.is_initialized():
        return is_local()
    # In a driver that joined a cluster, the global node only connects; it is not a head.
    node: Any = ray._private.worker._global_node
    return node is not None and bool(node.is_head())


def cpus_here() -> float:
    """The CPUs that a Ray of this process's own has, or would have: all of the machine, or of its container."""
    if ray.is_initialized():
        return float(ray.cluster_resources().get("CPU", 0))
    from ray._private.resource_and_label_spec import ResourceAndLabelSpec

    given = ResourceAndLabelSpec._load_env_resources().get("CPU")
    return float(ray._private.utils.get_num_cpus() if given is None else given)


def own_cpus() -> int | None:
    """The CPUs of a Ray that this process started, on this machine alone; None in a cluster, which may grow."""
    return int(ray.cluster_resources().get("CPU", 0)) if is_ours() else None
