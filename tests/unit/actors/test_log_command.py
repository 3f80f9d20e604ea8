"""``xidstream tables`` and ``xidstream consumer``: what a person and a script read of a change log that was cut."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.unit.sinks.test_log_folds import AT, log_of_one_snapshot
from tests.unit.sinks.test_log_shortening import TABLE, Root
from xidstream.actors.cli.main import main
from xidstream.pipeline.changelog import consumers
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.findings import Status
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.sink_findings import ServerSide, check_of_delta


@pytest.fixture
def made(tmp_path: Path) -> Root:
    return log_of_one_snapshot(Location.parse(str(tmp_path)))


def command(made: Root, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--sink", f"delta:{made.root.uri}"])
    return int(ended.value.code or 0)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_tables_say_from_where_on_each_can_be_read(made: Root, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(made, "tables") == 0
    assert words(capsys.readouterr().out)[1] == [TABLE, "0/33", "all", "there", "are"]
    made.shorten("5h", folds=True)
    assert command(made, "tables") == 0
    heads, row, last = words(capsys.readouterr().out)
    assert heads == ["table", "states", "from", "changes"] and row == [TABLE, "0/63D", "behind", "0/63D"]
    assert " ".join(last) == "up to 0/7D0 states can be read, up to 0/7D0 changes"
    assert command(made, "tables", "--json") == 0
    lsn = str(Lsn(AT))
    told = {"table": TABLE, "oldest_lsn": lsn, "cut_lsn": lsn, "problem": None}
    assert json.loads(capsys.readouterr().out) == [told]


def test_consumers_are_listed_with_their_age_and_removed_by_name(
    made: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(made, "consumer", "list") == 0
    assert capsys.readouterr().out == "no consumer is registered\n"
    made.log.consumer("billing").commit(1_000)
    made.log.consumer("audit").commit(2_000)
    assert command(made, "consumer", "list") == 0
    _, audit, billing = words(capsys.readouterr().out)
    assert audit[:3] == ["audit", "0/7D0", "nothing"] and audit[-1] == "ago"
    assert billing[:6] == ["billing", "0/3E8", "1000", "B", "of", "WAL"]
    assert command(made, "consumer", "list", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["lsn"]) for each in told] == [("audit", "0/7D0"), ("billing", "0/3E8")]
    assert command(made, "consumer", "remove", "--name", "biling") == 2
    assert "did you mean billing?" in capsys.readouterr().err
    assert command(made, "consumer", "remove", "--name", "billing") == 0
    assert [each.name for each in made.log.consumers()] == ["audit"]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({}, "may remove changes behind 0/3E8, up to 0/7D0 (1000 B of WAL), when it is gone"),
        (
            {"audit": 1_500},
            "up to 0/5DC (500 B of WAL), when it is gone; consumer audit needs those after it",
        ),
        ({"audit": 1_000}, "consumer audit at 0/3E8 holds back all that this one does"),
    ],
)
def test_a_removal_says_which_changes_it_lets_go(
    made: Root, others: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lsn in {"billing": 1_000, **others}.items():
        made.log.consumer(name).commit(lsn)
    assert command(made, "consumer", "remove", "--name", "billing") == 0
    text = capsys.readouterr().out.splitlines()[0]
    assert text.startswith("consumer billing has processed all up to 0/3E8, and told so ") and text.endswith(
        said
    )


def test_a_consumer_that_has_all_holds_back_nothing(made: Root, capsys: pytest.CaptureFixture[str]) -> None:
    made.log.consumer("billing").commit(2_000)
    assert command(made, "consumer", "remove", "--name", "billing") == 0
    assert "it has all that there is, and holds back nothing yet" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "arguments", "status", "is_left"),
    [
        ("n\n", (), 1, True),
        ("\n", (), 1, True),
        ("y\n", (), 0, False),
        ("", ("--yes",), 0, False),
        ("", (), 130, True),
    ],
)
def test_a_person_in_a_terminal_is_asked_before_a_consumer_is_removed(
    made: Root,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    arguments: tuple[str, ...],
    status: int,
    is_left: bool,
) -> None:
    made.log.consumer("billing").commit(1_000)
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stdout", screen)
    assert command(made, "consumer", "remove", "--name", "billing", *arguments) == status
    assert [each.name for each in made.log.consumers()] == ["billing"] * is_left
    assert ("Remove consumer billing? This cannot be undone." in screen.getvalue()) == (not arguments)


def test_a_consumer_that_seems_to_be_gone_is_told_by_check_and_by_the_run(
    made: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = SlotIdentity(7, "shop", "orders")
    server = ServerSide(identity, lambda: Tenure(1, "epoch", 1, {}, Lsn(10**9)), [("public", "a")])

    def warned() -> list[str]:
        found = check_of_delta(made.root.uri, "")(server)
        assert all(each.status is not Status.FAILED for each in found)
        return [each.text for each in found if each.status is Status.WARNING]

    made.log.consumer("billing").commit(1_000)
    made.log.consumer("audit").commit(2_000)
    assert warned() == []
    monkeypatch.setattr(consumers, "FORGOTTEN_S", 0.0)
    (text,) = warned()
    assert "consumer billing" in text and "behind 0/3E8" in text
    made.shorten("5h", folds=True)
    told = [each for each in caplog.messages if "for consumer billing" in each]
    assert made.log.cut_lsn(TABLE) < 1_000 and len(told) == 1
