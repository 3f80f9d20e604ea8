"""``run --help`` is short and in sections; ``--help-all`` has every setting, at every width of the terminal."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

from xidstream.actors.cli.main import cli, main
from xidstream.actors.cli.options import SECTIONS
from xidstream.pipeline.settings.config import Config

SETTINGS = {f.name for f in dataclasses.fields(Config)} - {"spark_conf"}


def shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    width: int,
    command: str = "run",
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        main([command, flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def settings_of(text: str) -> list[str]:
    options = [name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)]
    return [name for name in options if name in SETTINGS]


def test_every_setting_is_in_one_section() -> None:
    listed = [name for usual, expert in SECTIONS.values() for name in usual + expert]
    assert sorted(listed) == sorted(SETTINGS)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_help_all_shows_every_setting_and_help_only_the_usual_ones_in_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    everything = shown(monkeypatch, capsys, "--help-all", width)
    usual = shown(monkeypatch, capsys, "--help", width)
    assert sorted(settings_of(everything)) == sorted(SETTINGS)
    assert settings_of(usual) == [name for names, _ in SECTIONS.values() for name in names]
    for text in (everything, usual):
        titles = re.findall(r"^(\w+):$", text, re.MULTILINE)
        assert titles == [
            "Source",
            "Sink",
            "Journal",
            "Snapshots",
            "Mirror",
            "Latency",
            "Memory",
            "Status",
            "Spark",
            "General",
        ]
        assert max(map(len, text.splitlines())) <= max(width, 100), "the examples are the longest lines"
    assert "28 more settings: `xidstream run --help-all`" in usual
    assert "more settings" not in everything


def test_check_knows_every_option_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "Give it the options of the run", says docs/alerts.md, and it refused most of them."""
    assert sorted(settings_of(shown(monkeypatch, capsys, "--help-all", 100, "check"))) == sorted(SETTINGS)


def test_no_commands_help_is_cut_off_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ([], ["slot"], ["source"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        shown = capsys.readouterr().out
        assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2], shown


def test_a_capture_has_the_settings_of_a_run_without_sink_and_spark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = settings_of(shown(monkeypatch, capsys, "--help-all", 100, "capture"))
    assert {"dsn", "slot", "storage", "available_now", "journal_max_bytes", "buffers_max"} <= set(everything)
    assert not [name for name in everything if name.startswith(("spark_", "mirror_", "batch_", "sink"))]
    assert set(settings_of(shown(monkeypatch, capsys, "--help", 100, "capture"))) < set(everything)


def words_of(command: click.Command, path: str = "xidstream") -> set[str]:
    """The commands below ``command`` with their arguments and options, as people type them."""
    found = {f"{path} {name}" for each in command.params for name in (*each.opts, *each.secondary_opts)} | {
        path
    }
    for name, below in getattr(command, "commands", {}).items():
        found |= words_of(below, f"{path} {name}")
    return found


def test_no_command_and_no_option_is_gone() -> None:
    """What scripts and unit files of people say. A new one comes into the list; none is taken out of it."""
    kept = (Path(__file__).parent / "command_line.txt").read_text(encoding="utf-8").splitlines()
    assert kept == sorted(kept) and set(kept) - words_of(cli) == set()
