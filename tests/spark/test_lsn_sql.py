"""The formulas of docs/python.md that turn LSNs from numbers into text, and back, in Spark."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lsn_sql import NUMBERS, TEXTS, formulas

pytestmark = pytest.mark.spark


def test_an_lsn_goes_from_its_number_to_its_text_and_back_in_spark(spark: Any) -> None:
    to_text, to_number = formulas("spark")
    spark.createDataFrame([(number,) for number in NUMBERS], "lsn long").createOrReplaceTempView("numbers")
    assert [row.text for row in spark.sql(to_text).collect()] == list(TEXTS)
    spark.createDataFrame([(text,) for text in TEXTS], "text string").createOrReplaceTempView("texts")
    found = spark.sql(to_number)
    assert found.schema.simpleString() == "struct<lsn:bigint>"
    assert [row.lsn for row in found.collect()] == list(NUMBERS)
