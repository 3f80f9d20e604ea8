"""What a process of ours tells of itself for the run's account: its id, its node, its memory."""

from __future__ import annotations

import os
from functools import lru_cache

import psutil
import ray

from xidstream.pipeline.account.model import ProcessPart


def this_process(part: str) -> ProcessPart:
    """``part`` is its name for people."""
    return ProcessPart(part, os.getpid(), _node(), psutil.Process().memory_info().rss)


@lru_cache(maxsize=1)
def _node() -> str:
    return str(ray.util.get_node_ip_address())
