"""RayDP's master with a gateway that asks for a secret: no other login of the machine can use it.

The master is a Ray actor, on any node. It starts a JVM and drives it through Py4J. RayDP's own entry point of that
JVM (``AppMasterEntryPoint``) asks nobody for anything: every login of the machine can run code as the user of Ray.
Spark has an entry point for the same purpose, ``PythonGatewayServer``. It makes a secret, and writes it to a file in a
private folder, where whoever started the JVM reads it. Here the JVM starts with that one. What RayDP asks of its own
entry point is one object, which can be made through any gateway.

Rejected: a second, locked gateway in RayDP's JVM, made through the open one, which then is shut. Whoever tries all
ports all the time would find it open for a moment.

RayDP's application master has one name for all sessions, in the namespace of the Ray job. So a second session on a
cluster did not start, nor one whose predecessor was still ending. Here each master has a namespace of its own for it.
(The master's own name in Ray is made of the application's: two sessions of one application's name still meet there.)

``session`` calls ``lock_master`` before ``raydp.init_spark``. Both RayDP 1.6.5 and 1.7 start their JVM in this way.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ray
from py4j.java_gateway import GatewayParameters, JavaGateway
from raydp import versions
from raydp.spark import ray_cluster, ray_cluster_master

from xidstream.actors.driver.private_library import load_library

_ENTRY_POINT: Final = "org.apache.spark.api.python.PythonGatewayServer"
_NAMESPACE: Final = "ray.job.namespace"
_POLL_S: Final = 0.1

_RayDPMaster: Any = ray_cluster_master.RayDPSparkMaster.__ray_metadata__.modified_class.__ray_actor_class__


class LockedMaster(_RayDPMaster):
    """The actor. All but the start of its JVM, and its namespace, is RayDP's."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._namespace = f"raydp-{secrets.token_hex(8)}"

    def _launch_gateway(self, class_path: str, popen_kwargs: dict[str, Any] | None = None) -> JavaGateway:
        folder = tempfile.mkdtemp()
        file = Path(folder, "gateway")
        try:
            process = subprocess.Popen(
                [*self._java(), "-cp", class_path, _ENTRY_POINT],
                **(popen_kwargs or {}),
                stdin=subprocess.PIPE,  # the JVM ends when this process does
                env={
                    **os.environ,
                    "_PYSPARK_DRIVER_CONN_INFO_PATH": str(file),
                    "PYSPARK_PIN_THREAD": "false",  # else it has another protocol
                },
                preexec_fn=_ignore_interrupts,
            )
            while process.poll() is None and not file.exists():
                time.sleep(_POLL_S)
            if not file.exists():
                raise RuntimeError(f"the JVM of RayDP's master ended with {process.returncode}")
            content = file.read_bytes()
        finally:
            shutil.rmtree(folder)
        port, n_bytes = int.from_bytes(content[:4], "big"), int.from_bytes(content[4:8], "big")
        gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=port, auth_token=content[8 : 8 + n_bytes].decode(), auto_convert=True
            )
        )
        gateway.proc = process
        load_library(gateway.jvm)
        bridge = gateway.jvm.org.apache.spark.deploy.raydp.AppMasterJavaBridge
        gateway.entry_point = SimpleNamespace(getAppMasterBridge=bridge)
        return gateway

    def _generate_ray_configs(self) -> str:
        """Ray's properties for RayDP's JVMs. They are asked for twice: for the master's, and for the driver's."""
        options = json.loads(super()._generate_ray_configs())
        return json.dumps({**options, _NAMESPACE: self._namespace})

    def _java(self) -> list[str]:
        """The program and its options, as RayDP gives them."""
        node: Any = ray._private.worker._global_node
        configs = self._configs
        factory = ray_cluster_master.SPARK_RAY_LOG4J_FACTORY_CLASS_KEY
        return [
            "java",
            *shlex.split(configs.get(ray_cluster_master.RAYDP_APPMASTER_EXTRA_JAVA_OPTIONS, "")),
            *shlex.split(os.environ.get("JAVA_OPTS", "")),
            f"-javaagent:{configs[ray_cluster_master.SPARK_JAVAAGENT]}",
            f"-Dray.logging.dir={node.get_logs_dir_path()}",
            f"-D{factory}={configs[factory]}",
            f"-D{versions.RAY_LOG4J_CONFIG_FILE_NAME_KEY}={configs[ray_cluster_master.RAY_LOG4J_CONFIG_FILE_NAME]}",
        ]


def lock_master() -> None:
    """Have the next ``raydp.init_spark`` of this process make this master."""
    ray_cluster.RayDPSparkMaster = ray.remote(LockedMaster)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
