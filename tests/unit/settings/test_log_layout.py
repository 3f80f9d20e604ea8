"""The setting ``log_layout``: a column of a table by pattern."""

from __future__ import annotations

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.log_layout import NO_LAYOUT, LogLayout


def test_the_first_pattern_that_fits_counts_and_a_table_can_be_left_in_commit_order() -> None:
    found = LogLayout.parse("public.audit=, public.orders=created_at , public.*=day")
    assert [found.of(f"public.{name}") for name in ("audit", "orders", "items")] == ["", "created_at", "day"]
    assert found.of("sales.orders") == "" and LogLayout.parse("") == NO_LAYOUT


@pytest.mark.parametrize("text", ["created_at", "=created_at", "public.a=b, c"])
def test_a_column_without_a_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="log_layout has a"):
        Config(sink="delta:/lake", log_layout=text)


def test_it_reaches_the_sink_and_is_refused_where_no_files_are_merged() -> None:
    assert Config(sink="delta:/lake", log_layout="public.a=b").sink_settings.layout.of("public.a") == "b"
    with pytest.raises(ConfigError, match="log_layout is for a Delta sink") as error:
        Config(sink="iceberg:local/shop", log_layout="public.a=b")
    assert "docs/iceberg.md" in error.value.remedy
