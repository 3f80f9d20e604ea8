"""deploy/Dockerfile: what can be known without building it (docs/cluster.md says what was built and run)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from xidstream.actors.cli.main import cli

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
INSTRUCTIONS = [(line.split()[0], line.partition(" ")[2]) for line in LINES if line and line[0] not in "# "]


def of(instruction: str) -> list[str]:
    return [text for name, text in INSTRUCTIONS if name == instruction]


def copied() -> list[str]:
    """What is copied from the checkout."""
    return [word for text in of("COPY") if not text.startswith("--from") for word in text.split()[:-1]]


def test_it_is_made_of_what_the_checkout_has_and_of_all_that_the_package_needs() -> None:
    assert all((ROOT / name).exists() for name in copied())
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (modules,) = re.findall(r"^py-modules = \[(.*?)\]", pyproject, re.MULTILINE)
    needed = {"actors", "pipeline", "xidstream", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert needed | {"constraints.txt"} | {f"{each}.py" for each in re.findall(r'"(\w+)"', modules)} == set(
        copied()
    )


def test_nothing_else_is_sent_to_the_builder() -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied())


def test_all_that_is_installed_is_pinned_and_no_registry_is_named() -> None:
    installed = [step.split() for text in of("RUN") for step in text.split("&&") if "pip install" in step]
    assert installed and all(words[words.index("-c") + 1] == "constraints.txt" for words in installed)
    assert any("'.[pinned,s3]'" in words for words in installed)
    assert all("." not in base.partition("/")[0].partition(":")[0] for base in of("FROM")), "a host has a dot"


def test_it_runs_as_a_user_without_rights_under_a_number_that_kubernetes_can_check() -> None:
    (user,) = of("USER")
    number, group = user.split(":")
    assert int(number) == int(group) > 999
    assert any(f"useradd --uid {number} " in text for text in of("RUN"))
    assert INSTRUCTIONS.index(("USER", user)) > max(
        i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "RUN"
    )


def test_it_starts_the_command_line_and_a_java_is_on_every_path() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    words = [*re.findall(r'"([^"]+)"', entry), *re.findall(r'"([^"]+)"', command)]
    assert words == ["tini", "--", "xidstream", "--help"]
    packages = {word for text in of("RUN") for word in shlex.split(text)}
    assert {"openjdk-17-jre-headless", "tini", "wget"} <= packages, (
        "Spark 3.5 ends at Java 17; KubeRay's probes need wget"
    )
    assert "run" in cli.commands
