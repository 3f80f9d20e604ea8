"""Blocks for the decoder's tests, written with struct, independently of ``pipeline.pgoutput``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity

OIDS = {
    "bool": 16, "bytea": 17, '"char"': 18, "name": 19, "int8": 20, "int2": 21, "int4": 23, "text": 25,
    "oid": 26, "json": 114, "float4": 700, "float8": 701, "bpchar": 1042, "varchar": 1043, "date": 1082,
    "timestamp": 1114, "timestamptz": 1184, "interval": 1186, "numeric": 1700, "uuid": 2950, "jsonb": 3802,
    "bool[]": 1000, "bytea[]": 1001, "int2[]": 1005, "int4[]": 1007, "text[]": 1009, "int8[]": 1016,
    "float4[]": 1021, "float8[]": 1022, "timestamp[]": 1115, "date[]": 1182, "timestamptz[]": 1185,
    "numeric[]": 1231, "uuid[]": 2951,
}  # fmt: skip


class Unchanged:
    """Kind u."""


class Binary:
    """Kind b."""


U = Unchanged()
B = Binary()
Value = str | bytes | Unchanged | Binary | None
LSN = 0x1_0000_0AB0


def numeric_modifier(precision: int, scale: int) -> int:
    return (precision << 16 | (scale & 0x7FF)) + 4


def relation(
    *columns: tuple[str, str] | tuple[str, str, int],
    keys: Sequence[str] = (),
    relid: int = 5,
    name: str = "t",
) -> RelationVersion:
    """Columns are (name, type) or (name, type, modifier)."""
    made = tuple(Column(c[0], OIDS[c[1]], c[2] if len(c) == 3 else -1, c[0] in keys) for c in columns)
    return RelationVersion(relid, "public", name, ReplicaIdentity.DEFAULT, made)


def tuple_data(values: Sequence[Value]) -> bytes:
    out = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            out.append(b"n")
        elif isinstance(value, Unchanged):
            out.append(b"u")
        elif isinstance(value, Binary):
            out.append(b"b" + struct.pack(">I", 1) + b"\1")
        else:
            raw = value.encode() if isinstance(value, str) else value
            out.append(b"t" + struct.pack(">I", len(raw)) + raw)
    return b"".join(out)


def _xid(subxid: int | None) -> bytes:
    return b"" if subxid is None else struct.pack(">I", subxid)


def insert(values: Sequence[Value], *, subxid: int | None = None, relid: int = 5) -> bytes:
    return b"I" + _xid(subxid) + struct.pack(">I", relid) + b"N" + tuple_data(values)


def update(
    new: Sequence[Value],
    *,
    key: Sequence[Value] | None = None,
    old: Sequence[Value] | None = None,
    subxid: int | None = None,
    relid: int = 5,
) -> bytes:
    before = b"K" + tuple_data(key) if key is not None else b"O" + tuple_data(old) if old is not None else b""
    return b"U" + _xid(subxid) + struct.pack(">I", relid) + before + b"N" + tuple_data(new)


def delete(
    *,
    key: Sequence[Value] | None = None,
    old: Sequence[Value] | None = None,
    subxid: int | None = None,
    relid: int = 5,
) -> bytes:
    before = b"K" + tuple_data(key) if key is not None else b"O" + tuple_data(old or ())
    return b"D" + _xid(subxid) + struct.pack(">I", relid) + before


def truncate(relids: Sequence[int], *, subxid: int | None = None) -> bytes:
    return b"T" + _xid(subxid) + struct.pack(f">IB{len(relids)}I", len(relids), 0, *relids)


def logical(
    prefix: str | bytes, content: bytes, *, lsn: int = LSN, flags: int = 1, xid: int | None = None
) -> bytes:
    raw = prefix.encode() if isinstance(prefix, str) else prefix
    return (
        b"M"
        + _xid(xid)
        + struct.pack(">BQ", flags, lsn)
        + raw
        + b"\0"
        + struct.pack(">I", len(content))
        + content
    )


def begin(commit_lsn: int, xid: int, timestamp_us: int = 0) -> bytes:
    return b"B" + struct.pack(">QQI", commit_lsn, timestamp_us, xid)


def commit(commit_lsn: int, timestamp_us: int = 0, *, flags: int = 0) -> bytes:
    return b"C" + struct.pack(">BQQQ", flags, commit_lsn, commit_lsn + 8, timestamp_us)


def origin(name: str) -> bytes:
    return b"O" + struct.pack(">Q", 0) + name.encode() + b"\0"


Block = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]


def block(*messages: bytes) -> Block:
    """Payload and lengths, both read-only, as an object store gives them. Message i has LSN + i."""
    framed = [b"w" + struct.pack(">QQQ", LSN + i, LSN + i, 0) + message for i, message in enumerate(messages)]
    payload = np.frombuffer(b"".join(framed), np.uint8)
    lengths = np.frombuffer(np.array([len(each) for each in framed], np.int32).tobytes(), np.int32)
    return payload, lengths
