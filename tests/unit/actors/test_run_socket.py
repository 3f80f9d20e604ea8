"""A run is found by its slot and asked over a socket that leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading

import pytest

from xidstream.actors.runtime.run_socket import RunSocket, ask, running, slot_of
from xidstream.pipeline.errors import EnvironmentFault


@pytest.fixture
def slot() -> str:
    """Of this test alone: such sockets are the whole machine's."""
    return f"test_{secrets.token_hex(4)}"


def test_a_run_is_found_by_its_slot_and_answers_each_time_anew_until_it_ends(slot: str) -> None:
    answers = iter(["one", "two"])
    served = RunSocket(slot, lambda: next(answers))
    assert running(slot) == [served.name] and slot_of(served.name) == slot
    assert served.name in running() and running(slot[:-1]) == []
    assert [ask(served.name), ask(served.name)] == ["one", "two"]
    served.close()
    assert running(slot) == [] and ask(served.name) is None


def test_an_answer_of_a_megabyte_arrives_whole_and_a_reader_that_goes_away_ends_nothing(slot: str) -> None:
    text = "x" * (1 << 20)
    served = RunSocket(slot, lambda: text)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.connect(f"\0{served.name}")
    assert ask(served.name) == text
    served.close()


def test_readers_at_the_same_time_all_get_an_answer(slot: str) -> None:
    served = RunSocket(slot, lambda: "fine")
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(ask(served.name))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    served.close()
    assert found == ["fine"] * 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_refused_and_told_whom_to_ask(slot: str) -> None:
    served = RunSocket(slot, lambda: "secret")
    script = (
        "import os, sys; from xidstream.actors.runtime import run_socket as s; os.setuid(12345)\n"
        "print(repr(s.ask(sys.argv[1])))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script, served.name], capture_output=True, text=True, check=False, timeout=60
    )
    served.close()
    assert (
        "answers only its own user (user id 0)" in asked.stderr
        and "secret" not in asked.stdout + asked.stderr
    )


def test_a_run_whose_answer_fails_is_told_as_one_that_gives_no_account(slot: str) -> None:
    def fail() -> str:
        raise RuntimeError("defect")

    served = RunSocket(slot, fail)
    for _ in range(2):
        with pytest.raises(
            EnvironmentFault, match=f"a run of slot {slot} is on this machine, and has not told its state"
        ):
            ask(served.name)
    served.close()
