"""Any text between our quotes is that text to the server, also where a role's settings would read it in another way."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql

from tests.postgres_fixtures import Database
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.stream_options import quote_identifier, quote_literal

pytestmark = pytest.mark.postgres

PIECES = st.sampled_from(
    ["'", '"', "\\", "\\'", "''", "$$", ";", "--", "/*", "E'", "U&'\\0041", "\n", "%s", "é", "x"]
)
TEXT = st.lists(PIECES, max_size=6).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=15
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXT)
@example("\\'; drop table t; --")
@example("\\")
def test_what_we_quote_is_one_literal_and_one_name(open_here: OpenHere, text: str) -> None:
    session = open_here.session
    (row,) = session.execute(f"SELECT {quote_literal(text)}".encode()).fetchall()
    assert row == (text,)
    name = text.encode()[:63].decode(errors="ignore")
    if name:
        described = session.execute(f"SELECT 1 AS {quote_identifier(name)}".encode()).description
        assert described is not None and [column.name for column in described] == [name]


class OpenHere:
    """A session as a run opens it, in a database where a backslash would begin an escape."""

    def __init__(self, database: Database) -> None:
        off = sql.SQL("alter database {} set standard_conforming_strings = off")
        database.connection.execute(off.format(sql.Identifier(database.name)))
        self.session = open_session(database.dsn(), "the test")


@pytest.fixture
def open_here(database: Database) -> OpenHere:
    return OpenHere(database)
