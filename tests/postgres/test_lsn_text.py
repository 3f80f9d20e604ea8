"""LSNs as numbers and as text: PostgreSQL's way, as docs/python.md has it, gives what ``Lsn`` gives."""

from __future__ import annotations

import pytest

from tests.lsn_sql import NUMBERS, TEXTS
from tests.postgres_fixtures import Database

pytestmark = pytest.mark.postgres


def test_postgresql_turns_lsns_both_ways_as_the_page_says(database: Database) -> None:
    for number, text in zip(NUMBERS, TEXTS, strict=True):
        query = "SELECT ('0/0'::pg_lsn + %s::numeric)::text, (%s::pg_lsn - '0/0')::bigint"
        assert database.connection.execute(query, (number, text)).fetchone() == (text, number)
