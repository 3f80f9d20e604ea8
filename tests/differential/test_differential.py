"""A streamed slot and its unstreamed twin hold the same: the short form of ``python -m tests.differential``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.differential.__main__ import options_of
from tests.differential.compare import difference
from tests.differential.local_pipeline import Message, Released, Sink
from tests.differential.runner import Differential
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

pytestmark = pytest.mark.differential


@pytest.mark.parametrize("two_phase", [False, True], ids=["one-phase", "two-phase"])
@pytest.mark.parametrize("seed", [102, pytest.param(103, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [16, 18], ids=lambda v: f"pg{v}")
def test_a_streamed_slot_holds_what_its_unstreamed_twin_holds(
    version: int,
    seed: int,
    two_phase: bool,
    differential_server: Callable[[int], EmbeddedPostgres],
    tmp_path: Path,
) -> None:
    options = options_of(seed, two_phase=two_phase, proto="any", streaming="any")
    assert options is not None
    run = Differential(differential_server(version), tmp_path, seed, options, n_steps=400, largest=5000)
    outcome = run.run()
    print(outcome)
    assert outcome.problem is None, f"{outcome}\nlast statements:\n" + "\n".join(outcome.history[-20:])
    assert outcome.stream_txns > 0 and outcome.n_streamed > 0
    assert outcome.n_spills > 0 and outcome.n_restarts > 0


def released(commit_lsn: int, *contents: bytes) -> Released:
    messages = [Message(commit_lsn, commit_lsn - 1, 7, True, "p", c) for c in contents]
    return Released(7, commit_lsn, commit_lsn + 1, None, None, None, True, 0, [], [], messages)


def sink(*transactions: Released) -> Sink:
    made = Sink()
    made.take(list(transactions), [m for t in transactions for m in t.messages])
    return made


def test_the_comparison_excepts_rolled_back_messages_and_no_others() -> None:
    twin = sink(released(10, b"kept"))
    assert difference(sink(released(10, b"kept")), twin) is None
    assert difference(sink(released(10, b"kept"), released(20, b"doomed")), twin, dropped={b"doomed"}) is None
    assert difference(sink(released(10, b"kept"), released(20, b"extra")), twin, dropped={b"doomed"})
    assert difference(sink(released(10, b"other")), twin)
    assert difference(sink(), twin)
    assert "rolled-back" in (difference(twin, twin, dropped={b"kept"}) or "")
