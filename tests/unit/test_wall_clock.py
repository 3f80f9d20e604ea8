"""Where the wall clock is read, and what for: nothing waits, and nothing is removed, by it alone.

Whoever reads it at a further place says here what happens when it is set, and docs/recovery.md ("When a clock is
wrong") has it for people. What waits, retries or rests counts ``time.monotonic``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READS = {
    "time.time",
    "time.time_ns",
    "time.localtime",
    "time.gmtime",
    "datetime.datetime.now",
    "datetime.now",
}
NAIVE = {"time.localtime", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}

SHOWN = "shown to people, or kept for them"
LAG = "a lag, which is wrong by what the two clocks differ"
STAMP = "the stamp of a file that is added, removed or named"
BELIEVED = "an age, which is not trusted alone (``watched_clock``)"
PLACES = {
    "actors/cli/checks.py": SHOWN,
    "actors/cli/log.py": SHOWN,
    "actors/cli/status.py": SHOWN,
    "actors/api/listeners.py": SHOWN,
    "actors/driver/batch_loop.py": LAG,
    "actors/supervision/epoch.py": "a part of a name, which has random digits, too",
    "actors/supervision/other_runs.py": SHOWN,
    "actors/supervision/run_accounts.py": "ages that are shown, which follow a clock that is set",
    "pipeline/changelog/consumers.py": SHOWN,
    "pipeline/changelog/manifest.py": STAMP,
    "pipeline/commits/commit_sequence.py": "whether an Iceberg batch waits for its pace, a second at most",
    "pipeline/commits/sequencer_report.py": LAG,
    "pipeline/delta/delta_table.py": STAMP,
    "pipeline/iceberg/erased_table.py": "the age of snapshots that an erasure expires: docs/recovery.md",
    "pipeline/log_tables/azure_copies.py": "a signature is good for an hour; Azure takes no clock so far off",
    "pipeline/log_tables/watched_clock.py": BELIEVED,
    "pipeline/changelog/delta_bases.py": STAMP,
    "pipeline/mirror/base_table.py": STAMP,
    "pipeline/mirror/base_tables.py": STAMP,
    "pipeline/mirror/vacuum.py": BELIEVED,
    "pipeline/postgres/connection.py": "the time in a status update, which the server shows",
    "pipeline/postgres/preflight.py": "compared with the server's, and told",
    "pipeline/sinks/log_shortening.py": "the later bound of the server's time; and a consumer's age, which is told",
    "pipeline/sinks/log_watch.py": "a consumer's age, which is told",
    "pipeline/sinks/sink_findings.py": "a consumer's age, which is told",
    "pipeline/storage/envelope.py": SHOWN,
}


def names(path: Path) -> set[str]:
    """What is read of ``time`` and ``datetime``, as ``datetime.datetime.now``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def sources() -> list[Path]:
    return sorted(path for floor in ("pipeline", "actors") for path in (ROOT / floor).glob("**/*.py"))


def test_the_wall_clock_is_read_where_it_is_said_what_for() -> None:
    found = {str(path.relative_to(ROOT)) for path in sources() if names(path) & READS}
    assert found == set(PLACES)


@pytest.mark.parametrize("name", sorted(NAIVE))
def test_no_time_is_one_of_the_hosts_time_zone(name: str) -> None:
    assert [str(path.relative_to(ROOT)) for path in sources() if name in names(path)] == []


def test_every_time_of_day_has_its_zone() -> None:
    """``now()`` and ``fromtimestamp(…)`` without a zone are the host's, and go back for an hour in autumn."""
    naive = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                n_needed = {"now": 1, "fromtimestamp": 2}.get(node.func.attr)
                is_datetime = ast.unparse(node.func.value).endswith("datetime")
                if n_needed is not None and is_datetime and len(node.args) + len(node.keywords) < n_needed:
                    naive.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert naive == []
