"""The two internal columns that are nearly always null: ``unchanged`` and ``text``.

While columns are decoded, only the row indexes of exceptions are collected, for each column. At the end these parts are
put in row order (a stable sort keeps wire order within a row) and become one list or map column. A batch without
exceptions only pays for a column of nulls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode.columns import check_offsets
from xidstream.pipeline.schema.rows import INTERNAL_FIELDS

_UNCHANGED_TYPE: pa.ListType = INTERNAL_FIELDS[3].type
_TEXT_TYPE: pa.MapType = INTERNAL_FIELDS[4].type

Rows = npt.NDArray[np.int64]


class Sparse:
    """Collects exceptions of one batch of ``n_rows`` rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._unchanged: list[tuple[str, Rows]] = []
        self._text: list[tuple[str, Rows]] = []
        self._texts: list[pa.Array] = []

    def add_unchanged(self, column: str, rows: Rows) -> None:
        """``rows: int64[]``, ascending."""
        self._unchanged.append((column, rows))

    def add_text(self, column: str, rows: Rows, texts: pa.Array) -> None:
        """``rows: int64[]``, ascending, and the text of each."""
        self._text.append((column, rows))
        self._texts.append(texts)

    def unchanged(self) -> pa.Array:
        """list<string>[n_rows]: null for a row of which the server sent all columns."""
        if not self._unchanged:
            return pa.nulls(self._n_rows, _UNCHANGED_TYPE)
        names, _, buffers, n_null = self._order(self._unchanged)
        return pa.Array.from_buffers(_UNCHANGED_TYPE, self._n_rows, buffers, n_null, children=[names])

    def text(self) -> pa.Array:
        """map<string, string>[n_rows]: null for a row whose values all have their native types."""
        if not self._text:
            return pa.nulls(self._n_rows, _TEXT_TYPE)
        names, order, buffers, n_null = self._order(self._text)
        check_offsets(sum(texts.nbytes for texts in self._texts))
        texts = pa.concat_arrays(self._texts).take(pa.array(order))
        entries = pa.StructArray.from_arrays(
            [names, texts], fields=[_TEXT_TYPE.key_field, _TEXT_TYPE.item_field]
        )
        return pa.Array.from_buffers(_TEXT_TYPE, self._n_rows, buffers, n_null, children=[entries])

    def _order(self, parts: Sequence[tuple[str, Rows]]) -> tuple[pa.Array, Rows, list[pa.Buffer], int]:
        """The names in row order, the permutation to it, the buffers of validity and offsets, the number of nulls."""
        rows = np.concatenate([rows for _, rows in parts])
        which = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=self._n_rows)
        offsets = np.zeros(self._n_rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        names = pa.array([name for name, _ in parts], pa.string()).take(pa.array(which[order]))
        present = counts > 0
        buffers = [pa.py_buffer(np.packbits(present, bitorder="little")), pa.py_buffer(offsets)]
        return names, order, buffers, self._n_rows - int(np.count_nonzero(present))
