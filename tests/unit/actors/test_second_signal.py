"""What a thread of a run gets that asks Ray after Ray has ended."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from xidstream.actors.runtime.signals import StopRequest

StopRequest().listen()
import ray

try:
    ray.get_actor("somebody")
except Exception as error:
    print(type(error).__name__)
print(ray.is_initialized())
"""


def test_it_gets_an_error_and_no_new_ray() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout.split()[-1] == "False", ended.stdout
    assert ended.stdout.split()[0] != "False", "it was told"
