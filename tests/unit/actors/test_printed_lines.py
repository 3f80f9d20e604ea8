"""What is printed in the driver actor, as the command line fetches it."""

from __future__ import annotations

import contextlib
import threading

from xidstream.actors.driver.printed_lines import PrintedLines


def test_lines_are_taken_once_and_only_whole() -> None:
    lines = PrintedLines()
    with contextlib.redirect_stdout(lines):
        print("one")
        print("two", "and", end=" ")
        assert lines.take() == ["one"]
        print("more")
    assert lines.take() == ["two and more"]
    assert lines.take() == []


def test_threads_that_print_at_once_do_not_break_into_each_others_lines() -> None:
    lines = PrintedLines()
    lines.write("of this ")
    other = threading.Thread(target=lines.write, args=("of another\n",))
    other.start()
    other.join()
    lines.write("thread\n")
    assert lines.take() == ["of another", "of this thread"]


def test_what_nobody_fetches_is_forgotten_the_oldest_first() -> None:
    lines = PrintedLines()
    for number in range(10_001):
        lines.write(f"{number}\n")
    assert lines.take() == [str(number) for number in range(1, 10_001)]
