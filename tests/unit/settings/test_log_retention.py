"""The setting ``log_retention``: an age, a size, or the base tables, for all tables or by pattern."""

from __future__ import annotations

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.log_retention import LogRetention, TableRetention


def test_one_value_is_for_all_tables_and_nothing_keeps_everything() -> None:
    assert LogRetention.parse("").keeps_all and LogRetention.parse("").of("public.a").keeps_all
    assert LogRetention.parse("30d").of("public.a") == TableRetention(age_s=30 * 86_400)
    assert LogRetention.parse("100 GB").of("public.a") == TableRetention(n_bytes=100 << 30)
    assert LogRetention.parse("4096").of("public.a") == TableRetention(n_bytes=4096)
    assert LogRetention.parse("base").of("public.a") == TableRetention(is_base=True)


def test_the_first_pattern_that_fits_counts_and_a_table_can_be_kept_whole() -> None:
    found = LogRetention.parse("public.audit=, public.a*=7d, 100 GB")
    assert found.of("public.audit").keeps_all
    assert found.of("public.accounts").age_s == 7 * 86_400
    assert found.of("sales.accounts").n_bytes == 100 << 30
    assert not found.keeps_all and LogRetention.parse("public.audit=").keeps_all


@pytest.mark.parametrize("text", ["soon", "30min", "1h,2h", "=30d", "public.a=soon"])
def test_what_is_no_retention_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="log_retention"):
        LogRetention.parse(text)
