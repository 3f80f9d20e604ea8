"""The console sink prints what is in the batch, dates beyond Python's included."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import INT8, TEXT, LocalSegments, Transaction, plain_messages, relation
from xidstream.pipeline.sinks.console import ConsoleSink

pytestmark = pytest.mark.spark


def test_console_shows_transactions_and_first_rows(make_batch: Any) -> None:
    items = relation("public.items", ("id", INT8), ("name", TEXT))
    out = io.StringIO()
    sink = ConsoleSink(n_rows=2, out=out)
    rows = [{"id": i, "name": f"item {i}"} for i in range(5)]
    sink.write(make_batch(Transaction(0x10, [(items, rows)], xid=77), plain_messages((0x20, "p", b"secret"))))
    text = out.getvalue()
    assert "xid 77 commit 0/10" in text
    assert "public.items: 5 rows" in text
    assert "item 1" in text
    assert "item 2" not in text
    assert "message 0/20 non-transactional 'p': 6 bytes" in text


def test_console_shows_the_first_messages_and_reads_no_others(
    make_batch: Any, segments: LocalSegments
) -> None:
    many = [(i, "p", b"x" * i) for i in range(1, 6)]
    units = [Transaction(0x10 * i, messages=many, messages_in="storage") for i in (1, 2)]
    batch = make_batch(*units)
    (Path(segments.root) / "32" / "messages.arrow").unlink()
    out = io.StringIO()
    ConsoleSink(n_rows=3, out=out).write(batch)
    assert [line for line in out.getvalue().splitlines() if "message " in line] == [
        f"  message 0/{i} transactional 'p': {size}"
        for i, size in ((1, "1 byte"), (2, "2 bytes"), (3, "3 bytes"))
    ]


def test_a_date_that_python_cannot_hold_is_printed(make_batch: Any) -> None:
    days = relation("public.days", ("d", 1082))
    out = io.StringIO()
    ConsoleSink(out=out).write(make_batch(Transaction(0x10, [(days, [{"d": 3_000_000}])])))
    assert "+10183-" in out.getvalue()
    assert "-- batch 0: 1 transaction, 1 row --" in out.getvalue()
    assert "public.days: 1 row\n" in out.getvalue() and "1 row in public.days" in out.getvalue()
