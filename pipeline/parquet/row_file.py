"""What is known of one file: its columns, its size and checksum, and where the two constants stand in it.

Everybody who touches a file starts from its ``RowFile``: nothing is searched for in the bytes. It travels in the names
of segments, and stands in manifests of prepared transactions.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.schema import RelationVersion, rows

LATE_COLUMNS: Final = ("_commit_lsn", "_commit_timestamp")
"""In this order the last two of the file."""
DICTIONARY_COLUMNS: Final = ("_change_type", "_xid", *LATE_COLUMNS)
"""A dictionary pays for what repeats by its nature, and costs much for what does not."""

PLACEHOLDERS: Final = (b"unbound\x80", b"no time\x80")
"""The placeholders of LSN and timestamp, as the file's bytes. Both are far below zero, and their checksums take
``CRC_BYTES`` as variable-length integers, which is the most that any takes."""
CRC_BYTES: Final = 5
VALUE_BYTES: Final = 8

CHANGE_TYPE: Final = pa.dictionary(pa.int8(), pa.string())
"""The type of ``_change_type`` as it is written: no row needs a string of its own. It is read as string."""
_EARLY: Final = [
    f.with_type(CHANGE_TYPE) if f.name == "_change_type" else f
    for f in rows.CONTRACT_FIELDS
    if f.name not in LATE_COLUMNS
]
_LATE: Final = [f for f in rows.CONTRACT_FIELDS if f.name in LATE_COLUMNS]


@dataclass(frozen=True)
class CommitStamp:
    """The constants that are bound late. ``commit_timestamp_us`` counts from the Unix epoch, UTC."""

    commit_lsn: int
    commit_timestamp_us: int


class PageOffsets(NamedTuple):
    """Where one constant stands in one row group: the offsets of its page's checksum, and of itself."""

    crc: int
    value: int


class PatchRange(NamedTuple):
    """A few bytes that change when a file is filled."""

    offset: int
    written: bytes
    bound: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.written)


@dataclass(frozen=True)
class RowFile:
    """One file as it was written. ``places``: for each row group the LSN's and the timestamp's; none if it has no rows.

    ``checksum`` is of the whole file; ``head_crc`` is the CRC-32 of its first ``head_bytes``, none of which filling
    changes. So the rest can be checked by itself.
    """

    n_rows: int
    n_bytes: int
    checksum: str
    head_crc: int
    page_offsets: tuple[tuple[PageOffsets, PageOffsets], ...]

    @property
    def head_bytes(self) -> int:
        return self.page_offsets[0][0].crc if self.page_offsets else self.n_bytes

    @property
    def tail_bytes(self) -> int:
        """A few kilobytes with one row group; with more of them all after the first."""
        return self.n_bytes - self.head_bytes

    def slots(self, commit: CommitStamp | None = None) -> Iterator[PatchRange]:
        """In ascending order. Without a commit ``bound`` is what was written."""
        written = [(encoded_crc(value), value) for value in PLACEHOLDERS]
        bound = written
        if commit is not None:
            numbers = (commit.commit_lsn, commit.commit_timestamp_us)
            values = [number.to_bytes(VALUE_BYTES, "little", signed=True) for number in numbers]
            bound = [(encoded_crc(value), value) for value in values]
        for group in self.page_offsets:
            for place, old, new in zip(group, written, bound, strict=True):
                yield PatchRange(place.crc, old[0], new[0])
                yield PatchRange(place.value, old[1], new[1])

    def to_json(self) -> dict[str, Any]:
        return {
            "n_rows": int(self.n_rows),
            "n_bytes": int(self.n_bytes),
            "checksum": self.checksum,
            "head_crc": int(self.head_crc),
            "places": [[*lsn, *timestamp] for lsn, timestamp in self.page_offsets],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RowFile:
        """Raises KeyError, TypeError or ValueError for what ``to_json`` never gives."""
        return cls(
            n_rows=value["n_rows"],
            n_bytes=value["n_bytes"],
            checksum=value["checksum"],
            head_crc=value["head_crc"],
            page_offsets=tuple((PageOffsets(a, b), PageOffsets(c, d)) for a, b, c, d in value["places"]),
        )


def encoded_crc(page: bytes) -> bytes:
    """A page's checksum as its header holds it: a signed 32-bit number as Thrift's zigzag variable-length integer.

    Always ``CRC_BYTES`` long: a short one gets continuation bytes that add nothing, which every reader takes.
    """
    crc = zlib.crc32(page)
    number = (crc << 1 ^ -(crc >> 31)) & 0xFFFFFFFF
    groups = [number >> 7 * i & 0x7F for i in range(CRC_BYTES)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


@functools.lru_cache(maxsize=64)
def file_schema(relation: RelationVersion) -> pa.Schema:
    """The table's columns, the contract's early ones, then ``LATE_COLUMNS``."""
    return pa.schema([*relation.arrow_fields, *_EARLY, *_LATE])


def change_types_of(codes: pa.Array) -> pa.Array:
    """``codes`` index ``rows.CHANGE_TYPES``. All have one dictionary, because the writer wants that."""
    return pa.DictionaryArray.from_arrays(codes, rows.change_type_values())


def change_type_codes(names: pa.Array) -> pa.Array:
    """The reverse. Raises ValueError for another name."""
    codes = pc.index_in(names, rows.change_type_values()).cast(pa.int8())
    if codes.null_count:
        raise ValueError("not a change type")
    return codes


def unbound(batch: pa.RecordBatch, relation: RelationVersion, xid: int) -> pa.RecordBatch:
    """Rows in internal layout (``rows.internal_schema``), whose ``ordinal`` is their ``_seq``, as ``file_schema`` has
    them. The columns of the table are shared with ``batch``. ``xid`` is the top-level one."""
    n = batch.num_rows
    change_type, _, seq, unchanged, text = batch.columns[: rows.N_INTERNAL]
    columns = [
        *batch.columns[rows.N_INTERNAL :],
        change_types_of(change_type),
        rows.constant(int(xid), n, pa.int64()),
        seq,
        unchanged,
        text,
    ]
    for field, placeholder in zip(_LATE, PLACEHOLDERS, strict=True):
        number = int.from_bytes(placeholder, "little", signed=True)
        columns.append(rows.constant(number, n, pa.int64()).view(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=file_schema(relation))
