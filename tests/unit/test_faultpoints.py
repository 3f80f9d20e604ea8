"""Fault points: the plan's syntax, once in all, and nothing at all when off."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xidstream.pipeline import faultpoints
from xidstream.pipeline.errors import ComponentLost, ConfigError, StorageFault
from xidstream.pipeline.faultpoints import POINTS, TOKENS_VARIABLE, VARIABLE, Fault, FaultPlan, parse, reach

ROOT = Path(__file__).parents[2]


def test_a_plan_names_point_action_argument_passage_and_tag() -> None:
    assert parse("segment_written:kill@3#17, sealed:error=StorageFault\nrecorded:delay=250@2") == (
        Fault("segment_written", "kill", nth=3, tag="17"),
        Fault("sealed", "error", error=StorageFault),
        Fault("recorded", "delay", delay_ms=250, nth=2),
    )
    tokens = {
        f.token for f in parse("sealed:kill, sealed:kill@2, sealed:kill#a, sealed:error, sealed:delay=2")
    }
    assert len(tokens) == 5


@pytest.mark.parametrize(
    "text",
    ["no_such_point:kill", "sealed", "sealed:explode", "sealed:kill=3", "sealed:stop=3", "sealed:delay",
     "sealed:delay=soon", "sealed:error=NoSuchError", "sealed:error=POLICY"],
)  # fmt: skip
def test_a_mistake_in_a_plan_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        FaultPlan(text, None)


def test_every_point_is_passed_somewhere_and_every_passage_is_a_point() -> None:
    passed: set[str] = set()
    for folder in ("actors", "pipeline"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach":
                    (argument,) = node.args
                    assert isinstance(argument, ast.Constant), path
                    passed.add(argument.value)
    assert passed == set(POINTS)


def test_an_error_strikes_at_its_passage_once() -> None:
    plan = FaultPlan("sealed:error=StorageFault@2", None)
    plan.reach("sealed")
    plan.reach("sealing")
    with pytest.raises(StorageFault, match="sealed"):
        plan.reach("sealed")
    plan.reach("sealed")


def test_a_token_makes_it_once_over_restarts_and_a_changed_file_is_seen(tmp_path: Path) -> None:
    plan_file, tokens = tmp_path / "plan", tmp_path / "tokens"
    tokens.mkdir()
    plan_file.write_text("sealed:error")
    first, second = (FaultPlan(f"@{plan_file}", str(tokens)) for _ in range(2))
    with pytest.raises(ComponentLost):
        first.reach("sealed")
    second.reach("sealed")
    FaultPlan(f"@{plan_file}", str(tokens)).reach("sealed")
    replacement = tmp_path / "next"
    replacement.write_text("sealed:error#again")
    replacement.rename(plan_file)
    with pytest.raises(ComponentLost):
        second.reach("sealed")
    assert sorted(p.name for p in tokens.iterdir()) == [
        "sealed-error-ComponentLost-1",
        "sealed-error-ComponentLost-1-again",
    ]


def test_a_stop_has_the_process_stand_still_until_it_may_go_on_and_says_which_one(tmp_path: Path) -> None:
    program = "from xidstream.pipeline.faultpoints import reach; reach('recorded'); print('went on')"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, VARIABLE: "recorded:stop#a", TOKENS_VARIABLE: str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        (token,) = tmp_path.iterdir()
        assert (token.name, int(token.read_text())) == ("recorded-stop-1-a", process.pid)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "went on\n"
    finally:
        process.kill()


def test_a_kill_ends_the_process_as_sigkill_does_and_an_unknown_point_is_a_usage_error(
    tmp_path: Path,
) -> None:
    def run(program: str, faults: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, VARIABLE: faults, TOKENS_VARIABLE: str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    program = "from pipeline.faultpoints import reach\nfor _ in range(3): reach('sealed'); print('passed', flush=True)"
    killed = run(program, "sealed:kill@2")
    assert (killed.returncode, killed.stdout) == (-9, "passed\n")
    assert run(program, "sealed:kill@2").returncode == 0, "the token was taken"
    command = "['run', '--slot', 's', '--publication', 'p', '--storage', '/tmp/s', '--sink', 'console']"
    failed = run(f"import xidstream.actors.cli.main as c; c.main({command})", "nowhere:kill")
    assert failed.returncode == 2 and "no fault point 'nowhere'" in failed.stderr


def test_it_is_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faultpoints, "_plan", None)
    for point in POINTS:
        reach(point)
    assert not faultpoints.armed()
