"""docs/messages.md says what the sources say, and the commands that remedies name are there."""

from __future__ import annotations

import re

import click
import pytest

from tests.messages import PAGE, messages, page_with_lists
from xidstream.actors.cli.main import cli

COMMAND = re.compile(
    r"`(?:xidstream )?((?:run|slot|snapshot|table|source|journal|status|resync|check|verify|--debug)\b[^`]*)`"
)


def command_lines() -> list[str]:
    """What stands between back ticks in texts and remedies, and is a command."""
    said = (f"{m.text} {m.remedy}" for m in messages())
    return sorted({line for text in said for line in COMMAND.findall(text)})


def test_the_page_has_every_message_of_the_sources() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_lists(page) == page, "run `make docs`"
    kinds = {message.kind for message in messages()}
    assert kinds == {"error", "event", "finding", "stall", "line", "phrase"}


@pytest.mark.parametrize("line", command_lines())
def test_a_command_that_a_message_names_is_there_with_its_options(line: str) -> None:
    command: click.Command = cli
    for word in line.split():
        if word.startswith("--"):
            known = {option for parameter in command.params for option in parameter.opts}
            assert word in known, f"{command.name} has no option {word}"
        elif isinstance(command, click.Group) and word.isalpha() and word.islower():
            found = command.get_command(click.Context(command), word)
            assert found is not None, f"there is no command {word}"
            command = found


def test_no_message_begins_with_a_word_that_needs_the_sentence_before() -> None:
    needy = [
        m.text for m in messages() if re.match(r"(of|those|that|whose|the same|as) ", m.text, re.IGNORECASE)
    ]
    assert needy == ["as of {new} UTC"]
