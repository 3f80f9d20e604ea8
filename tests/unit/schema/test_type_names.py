"""PostgreSQL's types as people write them. The server's own format_type is the oracle in tests/postgres."""

from __future__ import annotations

import pytest

from xidstream.pipeline.schema import Column
from xidstream.pipeline.schema.type_names import type_name


@pytest.mark.parametrize(
    ("oid", "modifier", "base", "name"),
    [
        (20, -1, None, "bigint"),
        (1700, (38 << 16 | 10) + 4, None, "numeric(38,10)"),
        (1700, (3 << 16 | (-2 & 0x7FF)) + 4, None, "numeric(3,-2)"),
        (1231, (10 << 16 | 2) + 4, None, "numeric(10,2)[]"),
        (1043, 24, None, "character varying(20)"),
        (1184, 3, None, "timestamp(3) with time zone"),
        (1187, -1, None, "interval[]"),
        (16500, -1, "public.mood", "public.mood"),
        (16501, 655366, "numeric", "numeric"),
        (99999, -1, None, "oid 99999"),
    ],
)
def test_a_type_is_named_as_in_sql(oid: int, modifier: int, base: str | None, name: str) -> None:
    assert type_name(Column("c", oid, modifier, False, base)) == name
