"""An event is its text for people, and one line of JSON for programs, whoever wrote it."""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.events import Event, JsonLines, of_error
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import Poison

STALL = Event("stalled", "stalled: the sink waits", part="sink", for_s=16.0, lsn=None)


class Lines:
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.logger = logging.getLogger("xidstream.test_events")
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(JsonLines())

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines()
    made.logger.addHandler(made.handler)
    yield made
    made.logger.removeHandler(made.handler)


def test_an_event_is_its_text_wherever_text_is_taken() -> None:
    assert STALL == "stalled: the sink waits" and f"shop: {STALL}" == "shop: stalled: the sink waits"
    assert (STALL.name, STALL.level, STALL.facts) == (
        "stalled",
        logging.WARNING,
        {"part": "sink", "for_s": 16.0},
    )


def test_names_with_line_separators_and_other_letters_stay_in_one_line_of_ascii(lines: Lines) -> None:
    name = "public.été\u2028\u0085x"
    lines.logger.warning(Event("note", f"table {name}", table=name))
    (line,) = lines.told
    assert line["table"] == name and lines.stream.getvalue().isascii()


def test_a_line_has_time_level_logger_event_message_and_the_facts(lines: Lines) -> None:
    lines.logger.warning(STALL)
    (line,) = lines.told
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "xidstream.test_events",
        "event": "stalled",
        "message": "stalled: the sink waits",
        "part": "sink",
        "for_s": 16.0,
    }


def test_what_libraries_log_is_a_line_too_and_a_text_of_several_lines_is_one(lines: Lines) -> None:
    lines.logger.warning("took %d s\nand more: %s", 3, "Zoë")
    (line,) = lines.told
    assert (line["event"], line["message"]) == ("log", "took 3 s\nand more: Zoë")


def test_of_a_foreign_exception_the_class_and_the_places_are_written_and_not_its_message(
    lines: Lines,
) -> None:
    try:
        raise ValueError("the value 'secret of a row'")
    except ValueError:
        lines.logger.exception("the account of this run cannot be given")
    assert "secret of a row" not in lines.stream.getvalue()
    (line,) = lines.told
    assert line["level"] == "error" and line["error"] == "ValueError"
    assert __file__ in line["at"][0]


def test_an_error_brings_its_class_and_remedy_and_what_is_given_up_by_xid_and_lsn(lines: Lines) -> None:
    lost = ConnectionLost("the server ended the connection")
    lines.logger.warning(
        of_error("restarting", f"{lost.message}; starting again in 1.0 s", lost, pause_s=1.0)
    )
    poison = Poison(Lsn(0x1500), "table t, column c: no date").of(Xid(749), Lsn(0x2000))
    again = pickle.loads(pickle.dumps(poison))
    lines.logger.error(of_error("failed", again.message, again, logging.ERROR))
    restarting, failed = lines.told
    assert (restarting["error"], restarting["remedy"]) == ("ConnectionLost", lost.remedy)
    assert restarting["pause_s"] == 1.0
    assert (failed["xid"], failed["lsn"], failed["commit_lsn"]) == (749, "0/1500", "0/2000")
    assert failed["error"] == "PoisonedChange" and "slot skip --xid 749" in failed["remedy"]
