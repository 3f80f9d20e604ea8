"""What becomes of a freed array's memory. Each in a process of its own: glibc's options cannot be taken back."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

ARRAY_BYTES = 8 << 20
PROGRAM = """
import resource
import numpy as np
from xidstream.actors.runtime.allocator import {option}

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = []

def make():
    made = [np.ones({size}, np.uint8) for _ in range(4)]
    if {keeps_some}:
        kept.append(bytearray(40_000))
    return made

{option}()
for _ in range(2):  # left alone, glibc maps the first four, and has the others in its heap
    make()
before = faults()
for _ in range(3):
    make()
print(faults() - before)
"""

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has mallopt")


def pages_given_anew(option: str, *, keeps_some: bool) -> int:
    """By the system, for three times four arrays that are freed together. ``keeps_some``: a small piece stays behind
    each four, so that the heap would not shrink if they were in it."""
    program = PROGRAM.format(option=option, size=ARRAY_BYTES, keeps_some=keeps_some)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_snapshots_reader_makes_its_arrays_in_memory_that_it_has() -> None:
    assert pages_given_anew("keep_freed_memory", keeps_some=False) < 100


def test_a_buffer_returns_an_arrays_memory_when_it_is_freed() -> None:
    # With huge pages the system gives 2 MiB at a time.
    assert pages_given_anew("return_freed_memory", keeps_some=True) >= 12 * ARRAY_BYTES >> 21
