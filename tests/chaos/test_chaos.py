"""The chaos run in short: each kind of process is killed once, in a process of its own with a Ray of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def chaos(*arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments],
        capture_output=True,
        text=True,
        timeout=540,
        stdin=subprocess.DEVNULL,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def judged(faults: str, *arguments: str) -> str:
    output = chaos("--seeds", "1", "--faults", faults, *arguments)
    assert f"{len(faults.split(','))} kills at" in output and "not reached" not in output
    found = re.search(
        r"(\d+) transactions, (\d+) rows.*: 0 lost, 0 twice, 0 alien, 0 out of order; (\d+) status", output
    )
    assert found is not None and all(int(n) > 0 for n in found.groups()), output
    return output


def test_killed_buffer_sequencer_and_executor_lose_nothing_and_confirm_nothing_early() -> None:
    judged("segment_written:kill,recorded:kill@2,spark_executor")


def test_killed_sequencer_and_driver_lose_nothing_of_the_journal_and_confirm_nothing_early() -> None:
    judged("journal_written:kill@2,loading_journal:kill,batch_written:kill", "--journal")


@pytest.mark.nightly
def test_a_run_that_stands_still_until_the_server_gives_it_up_loses_nothing_and_confirms_nothing_early() -> (
    None
):
    """All of its processes, while the sequencer records a position and while the reader sends a block."""
    faults = "recorded:stop#whole-1,giving_block:stop@2#whole-2,recording:stop#alone-3"
    output = chaos("--seeds", "1", "--faults", faults, "--outside", "0")
    assert "0 kills at 0 of" in output and "and 3 pauses at 3" in output and "not reached" not in output
    assert ": 0 lost, 0 twice, 0 alien, 0 out of order" in output


@pytest.mark.nightly
def test_a_killed_raydp_master_is_noticed_and_replaced_with_its_driver() -> None:
    """Its death shows as no exception anywhere: jobs would wait for ever."""
    assert "RayDP's master is lost" in judged("spark_master_gateway")


@pytest.mark.nightly
def test_a_driver_killed_while_it_commits_to_iceberg_loses_nothing_and_confirms_nothing_early() -> None:
    judged("iceberg_committing:kill@2,recorded:kill@2,committing_transactions:kill", "--iceberg")


def test_a_driver_killed_while_it_commits_all_tables_at_once_loses_nothing_and_leaves_no_table_ahead() -> (
    None
):
    judged("iceberg_committing:kill@2,recorded:kill@2,iceberg_tables_committed:kill", "--iceberg", "rest")
