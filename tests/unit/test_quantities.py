"""Counts, bytes and times as people read them."""

from __future__ import annotations

import pytest

from xidstream.pipeline.quantities import counted, human_bytes, human_ms, human_s, visible


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1000, "1,000 rows"), (-1, "-1 rows")]
)
def test_one_of_something_is_singular(n: int, text: str) -> None:
    assert counted(n, "row") == text


def test_bytes_and_times_have_the_unit_that_keeps_them_short() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [human_ms(n) for n in (None, 999, 27_100)] == ["-", "999 ms", "27.1 s"]
    assert [human_s(n) for n in (0.4, 12, 59.6, 184, 7500, 273_600)] == [
        "0.4 s",
        "12 s",
        "1 min 0 s",
        "3 min 4 s",
        "2 h 5 min",
        "3 d 4 h",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"),
        ("\udce9", "\\udce9"),
        ("é\\n", "é\\n"),
    ],
)
def test_what_would_not_be_seen_is_written_out_and_only_once(text: str, shown: str) -> None:
    assert visible(text) == visible(visible(text)) == shown
