"""What stands where Ray's agent would, on a Ray that a run started for itself and whose metrics nobody asked for.

Ray's agent offers a node's metrics, logs and jobs to a dashboard and to Prometheus. It holds 85 MB more than this
program, and takes 0.8 % of a core where nothing happens. A raylet insists on an agent's process, and waits for
the files in which the agent says where it listens. So this program writes the files, -1 for "nowhere", as Ray's own
agent does where Ray was installed without its dashboard, and ends when the raylet has ended.

``ray_cluster`` puts it into the command by which the raylet starts its agent. It is run as a file, by a Python without
site-packages: nothing but the standard library can be imported here, and nothing of this project.

Rejected: Ray's agent with ``--minimal``. By its source it still imports all of its modules where their packages are
installed.
"""

import os
import sys
import time

_SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_LOOK_S = 1.0


def main(arguments: list[str]) -> None:
    """``arguments``: those of Ray's agent."""
    # Ray says it. One that has ended already is not this process's parent any more, and whoever is may live for ever.
    raylet = int(os.environ["RAY_RAYLET_PID"])
    given = dict(
        argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    for service in _SERVICES:
        path = os.path.join(given["session-dir"], f"{service}_{given['node-id']}")
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
