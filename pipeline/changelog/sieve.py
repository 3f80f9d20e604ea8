"""The join of a base with the keys that a tail touches, for a base of which few rows are touched.

Spark sends the touched keys to every executor and looks each row of the base up in a hash table of them. With 100,000
keys that table no longer fits a processor's nearest caches, and each look at it waits for memory: that was two thirds
of what reading a state cost over a scan. So a row goes through a *sieve* first: a set of bits, 16 for each touched key,
in which most rows find that nobody touched them. Their key then is null for the join, and a null is looked up nowhere.

A key's bit is told by a number: a single integer by itself, so that rows in the order of their keys find their bits
side by side; any other key by a hash. Words of 64 bits are rows of a small frame, joined by a broadcast: nothing but
Spark's own joins. A bit may be another key's, too, so the join after the sieve decides.

Keys with a part that may be null are joined without it, since null is a value there, and so are floats, whose equal
values differ in their bits. Rejected: Spark's own Bloom filter, which no public function offers in 3.5.

Called by ``fold`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.internal_columns import KeyPart, all_of, same_key
from xidstream.pipeline.changelog.shape import TableShape

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LEAST_ROWS: Final = 10_000
"""The least rows of a tail for which a sieve is made. A hash table of fewer keys is quick as it is, and a sieve takes a
job."""
_BITS_A_ROW: Final = 16
_WORD_BITS: Final = 64


def sieved(
    base: DataFrame, prefix: str, touched: DataFrame, parts: Sequence[KeyPart], shape: TableShape, n_rows: int
) -> tuple[DataFrame, Column]:
    """``base`` with a few columns more, and the condition that joins it with touched keys, whose parts are ``t0``,
    ``t1``, …; the base's are ``prefix``0, … ``touched``: ``n_rows`` rows, a few at most, with each touched key at least
    once."""
    from pyspark.sql import functions as f

    number = _number(parts, shape)
    if number is None or n_rows < LEAST_ROWS:
        return base, same_key(parts, prefix, "t")
    n_words = 1 << (max(1, _BITS_A_ROW * n_rows // _WORD_BITS) - 1).bit_length()
    word = f"shiftright(number, 6) & {n_words - 1}L"
    bit = "cast(number & 63L as int)"
    numbers = touched.select(f.expr(number.format(prefix="t")).alias("number"))
    bits = f.expr(f"bit_or(shiftleft(1L, {bit}))").alias("bits")
    words = numbers.groupBy(f.expr(word).alias("word")).agg(bits)
    base = base.withColumn("number", f.expr(number.format(prefix=prefix)))
    base = base.join(f.broadcast(words), f.expr(word) == f.col("word"), "left")
    may_be = f.expr(f"(shiftright(bits, {bit}) & 1L) = 1L")
    base = base.withColumn("sieved", f.when(may_be, f.col(f"{prefix}0")))
    others = [f.col(f"{prefix}{i}") == f.col(f"t{i}") for i in range(1, len(parts))]
    return base, all_of([f.col("sieved") == f.col("t0"), *others])


def _number(parts: Sequence[KeyPart], shape: TableShape) -> str | None:
    """SQL for a key's number, with the ``prefix`` of its columns to be put in; None where equal keys may differ."""
    from pyspark.sql import types as t

    columns = list(shape.columns.values())
    types = [columns[part.column].type for part in parts]
    if any(part.may_be_null for part in parts) or any(isinstance(type_, t.FractionalType) for type_ in types):
        return None
    if len(parts) == 1 and isinstance(types[0], t.IntegralType):
        return "cast({prefix}0 as bigint)"
    return f"xxhash64({', '.join(f'{{prefix}}{i}' for i in range(len(parts)))})"
