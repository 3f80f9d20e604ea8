"""One file of the journal: release units that are committed, and that the sink does not hold yet, made durable.

The server does not send them again once the file is confirmed. So the segments that the units have in storage already
are flushed first (``flush_segments``). ``write_journal_file`` then writes the file, and returns when it is on disk. It
looks at what it writes as a reader would, as far as that is cheap: at a load it is too late to find a defect of the
writer. The two are two calls, because their failures differ. A file that could not be written is written again, under
another number. A flush that has failed may return without an error the next time, though what it was to flush is gone.

The bytes, all of them under a checksum::

    XIDSJRNL
    Arrow IPC stream        the transactions: a record batch for each unit
    Arrow IPC stream        the messages that units have inline: a record batch for each of these parts
    Arrow IPC streams       what units have in memory: each object once, however many parts refer to it
    directory               a JSON document that tells the units: ``journal_directory``
    summary                 a sealed JSON document, for whoever reads no more than that: ``journal_summary``
    <QI8s                   the summary's length and CRC-32, XIDSJRNL

Both documents are at the end, because lengths and checksums are known when an object has been written: at the beginning
they would ask for all objects in memory at once. Here one is in memory at a time, both ways.

Streams are compressed by LZ4, on one thread: small rows took 0.37 to 0.45 of their bytes, wide ones a fifth. It costs
1 ms a megabyte to write and 0.4 to 0.8 ms to read. Threads doubled the CPU of small record batches. zstd halved the
bytes once more, at two to three times the CPU.

Called by the commit sequencer. Who owns the slot, and whether the record names the file, is not looked at here.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NoReturn

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import (
    ArrowRef,
    InlineMessages,
    JournalFile,
    MemoryMessages,
    MemoryPart,
    MessagePart,
    Sealed,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.packs import PACK_SCHEMA
from xidstream.pipeline.poison import NO_SKIPS, Skips
from xidstream.pipeline.schema import rows
from xidstream.pipeline.storage.journal_directory import (
    INLINE_MESSAGES,
    N_OWN_OBJECTS,
    TRANSACTIONS,
    JournalDirectory,
    directory_from_json,
    directory_to_json,
)
from xidstream.pipeline.storage.journal_skips import has_skipped, without_skipped
from xidstream.pipeline.storage.journal_summary import (
    REMEDY,
    StoredObject,
    Summary,
    of_units,
    summary_from_json,
    summary_to_json,
    with_its_bytes,
)
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import Checksumming
from xidstream.pipeline.storage.side_by_side import side_by_side
from xidstream.pipeline.storage.storage import Storage, Write
from xidstream.pipeline.storage.stored_parts import verify_stored

MAGIC: Final = b"XIDSJRNL"
_TRAILER: Final = struct.Struct("<QI8s")
_TAIL_BYTES: Final = 64 << 10
"""What is read first of an object in an object store: the trailer, and a summary that names some hundred segments."""
_WRITE_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)

Fetch = Callable[[ArrowRef], pa.Table]
Put = Callable[[pa.Table], ArrowRef]
_StoredPart = MemoryPart | MemoryMessages


# -- written ---------------------------------------------------------------------------------------------


def flush_segments(storage: Storage, units: Iterable[Sealed]) -> None:
    """What ``units`` have in storage is on disk when this returns. Raises StorageFault, also where it is missing."""
    storage.sync([stored for unit in units for stored in unit.stored_keys()])


def write_journal_file(
    storage: Storage,
    layout: Layout,
    number: int,
    units: Sequence[Sealed],
    ends: Sequence[UnitEnd],
    fetch: Fetch,
) -> JournalFile:
    """Make ``units``, which follow each other in commit order, durable as file ``number`` of ``layout.epoch``. Their
    segments are flushed already.

    ``fetch`` gives the content of a reference, and is called once for each. Raises UsageError for what cannot be in a
    file; StorageFault; and what ``fetch`` raises. Then there is no such file, or one that is not known to be on disk.
    """
    if not units or len(units) != len(ends):
        raise UsageError(f"a journal file has units and their ends, got {len(units)} and {len(ends)}")
    if any(unit.undeliverable is not None for unit in units):
        raise UsageError("a unit with a transaction that cannot be delivered does not go to the journal")
    key = layout.journal_key(number)
    reach("writing_journal")
    with storage.create(key) as write:
        write(MAGIC)
        directory = _write_objects(write, units, ends, fetch)
        document = directory_to_json(directory)
        write(document)
        timestamp_us = _first_commit_timestamp_us(units)
        summary = Summary(
            of_units(directory.units, layout.epoch, number, timestamp_us),
            directory.objects_bytes,
            StoredObject(len(document), zlib.crc32(document)),
        )
        end = summary_to_json(summary, layout)
        write(end)
        write(_TRAILER.pack(len(end), zlib.crc32(end), MAGIC))
    storage.sync([key])
    reach("journal_written")
    return with_its_bytes(summary.file, _file_bytes(summary, len(end)))


def _write_objects(
    write: Write, units: Sequence[Sealed], ends: Sequence[UnitEnd], fetch: Fetch
) -> JournalDirectory:
    objects = _Objects(write, fetch)
    objects.add(rows.TRANSACTIONS_SCHEMA, [unit.transactions for unit in units])
    inline = [m.rows for unit in units for m in unit.messages if isinstance(m, InlineMessages)]
    objects.add(rows.MESSAGES_SCHEMA, inline)
    numbered = [_with_refs(unit, objects.of_part) for unit in units]
    return JournalDirectory(tuple(zip(ends, numbered, strict=True)), tuple(objects.written))


def _first_commit_timestamp_us(units: Iterable[Sealed]) -> int:
    first = next((unit.transactions for unit in units if unit.transactions.num_rows), None)
    return 0 if first is None else int(first.column("commit_timestamp")[0].value)


def _file_bytes(summary: Summary, summary_bytes: int) -> int:
    return len(MAGIC) + summary.objects_bytes + summary.directory.n_bytes + summary_bytes + _TRAILER.size


class _Objects:
    """The objects of a file, as they are written one after the other."""

    def __init__(self, write: Write, fetch: Fetch) -> None:
        self.written: list[StoredObject] = []
        self._write = write
        self._fetch = fetch
        self._of_ref: dict[ArrowRef, tuple[int, pa.Schema, int]] = {}

    def add(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """Write one as an Arrow IPC stream, and return its number."""
        sink = Checksumming(self._write)
        with (
            pa.PythonFile(sink, mode="w") as file,
            pa.ipc.new_stream(file, schema, options=_WRITE_OPTIONS) as stream,
        ):
            for batch in batches:
                stream.write_batch(batch)
        self.written.append(StoredObject(sink.n_bytes, sink.crc))
        return len(self.written) - 1

    def of_part(self, part: _StoredPart) -> int:
        """The number of the object that ``part`` refers to."""
        if part.ref not in self._of_ref:
            table = self._fetch(part.ref)
            number = self.add(table.schema, table.to_batches())
            self._of_ref[part.ref] = number, table.schema, table.num_rows
        number, schema, n_rows = self._of_ref[part.ref]
        if (misfit := _misfit(part, schema, n_rows)) is not None:
            raise UsageError(f"what is in memory is not what its unit says: {misfit}")
        return number


def _with_refs(unit: Sealed, ref: Callable[[_StoredPart], ArrowRef]) -> Sealed:
    """The unit with other references."""

    def message(part: MessagePart) -> MessagePart:
        return dataclasses.replace(part, ref=ref(part)) if isinstance(part, MemoryMessages) else part

    return dataclasses.replace(
        unit,
        memory=tuple(dataclasses.replace(part, ref=ref(part)) for part in unit.memory),
        messages=tuple(message(part) for part in unit.messages),
    )


def _misfit(part: _StoredPart, schema: pa.Schema, n_rows: int) -> str | None:
    """Why an object of this schema and of so many rows is not the one of ``part``."""
    if isinstance(part, MemoryMessages):
        return None if schema.equals(rows.MESSAGES_SCHEMA) else "it has not the columns of messages"
    if part.pack_index is not None:
        is_pack = schema.equals(PACK_SCHEMA)
        return None if is_pack and 0 <= part.pack_index < n_rows else f"it has no element {part.pack_index}"
    if not schema.equals(rows.contract_schema(part.relation)):
        return f"it has not the columns of {part.relation.name}"
    return None if n_rows == part.n_rows else f"it has {n_rows} rows, not {part.n_rows}"


# -- read ------------------------------------------------------------------------------------------------


def read_journal_file(storage: Storage, layout: Layout, epoch: str, number: int) -> JournalFile:
    """What the summary says; only the end of the object is read.

    Raises SegmentCorrupt where the file is missing, altered in what is read, of another length, or another's; raises
    Unsupported and StorageFault.
    """
    key = _key(layout, epoch, number)
    tail, file_bytes = _found(key, storage.read_tail(key, _TAIL_BYTES))
    if (needed := _summary_bytes(key, tail, file_bytes) + _TRAILER.size) > tail.size:
        tail, file_bytes = _found(key, storage.read_tail(key, needed))
    return with_its_bytes(_summary(layout, epoch, number, tail, file_bytes).file, file_bytes)


def read_journal_files(
    storage: Storage, layout: Layout, names: Sequence[tuple[str, int]]
) -> list[JournalFile | SegmentCorrupt]:
    """``read_journal_file`` of each epoch and number, several at a time; what is wrong with a file takes its place."""

    def read(name: tuple[str, int]) -> JournalFile | SegmentCorrupt:
        try:
            return read_journal_file(storage, layout, *name)
        except SegmentCorrupt as error:
            return error

    return list(side_by_side(read, names))


def verify_journal_file(storage: Storage, layout: Layout, epoch: str, number: int) -> JournalFile:
    """Read all of it, and all segments that it names; change nothing. Raises as ``load_journal_units``."""
    opened = _Opened(storage, layout, epoch, number)
    opened.verify_segments()
    opened.own_batches()
    for _ in opened.tables():
        pass
    return opened.file


def load_journal_units(
    storage: Storage, layout: Layout, file: JournalFile, put: Put, skips: Skips = NO_SKIPS
) -> list[tuple[UnitEnd, Sealed]]:
    """The units as they were written, but for their references: ``put`` makes these, once for each object. Nothing is
    in them of skipped transactions.

    All that the file names is read and verified, segments too. Raises SegmentCorrupt where something is missing or
    altered, or the file is not the ``file`` that was written; Unsupported; StorageFault; and what ``put`` raises.
    """
    reach("loading_journal")
    opened = _Opened(storage, layout, file.epoch, file.number)
    if opened.file != file:
        opened.refuse("is another than the one that was written")
    opened.verify_segments()
    transactions, inline = opened.own_batches()
    refs = {number: put(table) for number, table in opened.tables()}
    left = iter(inline)

    def loaded(unit: Sealed) -> Sealed:
        if has_skipped(unit, skips):
            return without_skipped(unit, skips, opened.table, put)
        return _with_refs(unit, lambda part: refs[part.ref])

    return [
        (end, loaded(_completed(unit, batch, left)))
        for (end, unit), batch in zip(opened.directory.units, transactions, strict=True)
    ]


@dataclasses.dataclass(eq=False)
class JournalRows:
    """Stands for a reference in a unit that was not loaded: an object of its file, read when it is asked for."""

    opened: _Opened
    number: int

    def table(self) -> pa.Table:
        return self.opened.table(self.number)


def stored_journal_units(storage: Storage, layout: Layout, file: JournalFile) -> list[tuple[UnitEnd, Sealed]]:
    """The units as they were written, with ``JournalRows`` for references: what is written to another file, and not
    released. Segments are not read, and what was given up is there still.

    Raises SegmentCorrupt where the file is missing, altered or another; Unsupported; StorageFault.
    """
    opened = _Opened(storage, layout, file.epoch, file.number)
    if opened.file != file:
        opened.refuse("is another than the one that was written")
    transactions, inline = opened.own_batches()
    refs = {number: JournalRows(opened, number) for number in opened.object_numbers}
    left = iter(inline)
    return [
        (end, _with_refs(_completed(unit, batch, left), lambda part: refs[part.ref]))
        for (end, unit), batch in zip(opened.directory.units, transactions, strict=True)
    ]


def _completed(unit: Sealed, transactions: pa.RecordBatch, inline: Iterator[pa.RecordBatch]) -> Sealed:
    messages = tuple(
        InlineMessages(next(inline)) if isinstance(part, InlineMessages) else part for part in unit.messages
    )
    return dataclasses.replace(unit, transactions=transactions, messages=messages)


class _Opened:
    """A whole file. The buffer of a local one is a memory map; one from an object store is in memory."""

    def __init__(self, storage: Storage, layout: Layout, epoch: str, number: int) -> None:
        self._storage = storage
        self._key = key = _key(layout, epoch, number)
        data = storage.read_buffer(key)
        self._data, file_bytes = _found(key, None if data is None else (data, data.size))
        summary = _summary(layout, epoch, number, self._data, file_bytes)
        self.file = with_its_bytes(summary.file, file_bytes)
        if self._data[: len(MAGIC)].to_pybytes() != MAGIC:
            self.refuse("is damaged at its beginning")
        start = len(MAGIC) + summary.objects_bytes
        document = self._data[start : start + summary.directory.n_bytes]
        if zlib.crc32(document) != summary.directory.crc32:
            self.refuse("is damaged: its directory differs from what was written")
        self.directory = directory_from_json(document, key)
        units = self.directory.units
        timestamp_us = summary.file.first_commit_timestamp_us
        found = of_units(units, epoch, number, timestamp_us) if units else None
        if found is not None and not summary.file.memory_bytes:
            # It was written before files told it.
            found = dataclasses.replace(found, memory_bytes=0)
        if found != summary.file:
            self.refuse("has other units than its summary says")
        sizes = (stored.n_bytes for stored in self.directory.objects)
        self._starts = list(itertools.accumulate(sizes, initial=len(MAGIC)))
        self._parts = self._parts_by_object()
        if self._starts[-1] != start:
            self.refuse("has not the objects that its directory tells")

    def refuse(self, reason: str) -> NoReturn:
        _refuse(self._key, reason)

    def verify_segments(self) -> None:
        units = [unit for _, unit in self.directory.units]
        verify_stored(
            self._storage,
            (part.segment for unit in units for part in unit.segments),
            (part.file for unit in units for part in unit.messages if isinstance(part, SpilledMessages)),
        )

    def own_batches(self) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """The units' transactions, and their inline messages: as many record batches as there should be."""
        units = [unit for _, unit in self.directory.units]
        n_inline = sum(isinstance(part, InlineMessages) for unit in units for part in unit.messages)
        return (
            self._own(TRANSACTIONS, rows.TRANSACTIONS_SCHEMA, len(units)),
            self._own(INLINE_MESSAGES, rows.MESSAGES_SCHEMA, n_inline),
        )

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """The objects that parts refer to, and their numbers: one after the other, each verified."""
        for number, parts in self._parts.items():
            table = self.table(number)
            for part in parts:
                if (misfit := _misfit(part, table.schema, table.num_rows)) is not None:
                    self.refuse(f"has an object {number} that is not its units': {misfit}")
            yield number, table

    @property
    def object_numbers(self) -> list[int]:
        """The numbers of the objects that parts refer to."""
        return list(self._parts)

    def table(self, number: int) -> pa.Table:
        batches, schema = self._batches(number)
        return pa.Table.from_batches(batches, schema)

    def _parts_by_object(self) -> dict[int, list[_StoredPart]]:
        found: dict[int, list[_StoredPart]] = {}
        for _, unit in self.directory.units:
            messages = [part for part in unit.messages if isinstance(part, MemoryMessages)]
            stored: list[_StoredPart] = [*unit.memory, *messages]
            for part in stored:
                found.setdefault(part.ref, []).append(part)
        if len(self.directory.objects) < N_OWN_OBJECTS or found.keys() != set(
            range(N_OWN_OBJECTS, len(self.directory.objects))
        ):
            self.refuse("has not the objects that its units refer to")
        return found

    def _own(self, number: int, schema: pa.Schema, n_batches: int) -> list[pa.RecordBatch]:
        batches, found = self._batches(number)
        if not found.equals(schema) or len(batches) != n_batches:
            self.refuse(f"has an object {number} that is not its units'")
        return batches

    def _batches(self, number: int) -> tuple[list[pa.RecordBatch], pa.Schema]:
        data = self._data[self._starts[number] : self._starts[number + 1]]
        if zlib.crc32(data) != self.directory.objects[number].crc32:
            self.refuse(f"is damaged: object {number} differs from what was written")
        try:
            with pa.ipc.open_stream(data, options=_READ_OPTIONS) as stream:
                return list(stream), stream.schema
        except (pa.ArrowException, OSError) as error:
            raise _corrupt(self._key, f"has an object {number} that is no Arrow stream") from error


def _key(layout: Layout, epoch: str, number: int) -> str:
    return dataclasses.replace(layout, epoch=epoch).journal_key(number)


def _found(key: str, read: tuple[pa.Buffer, int] | None) -> tuple[pa.Buffer, int]:
    if read is None:
        _refuse(key, "is missing")
    return read


def _summary_bytes(key: str, tail: pa.Buffer, file_bytes: int) -> int:
    """How long the summary is. ``tail`` is the end of the file, with the trailer at least."""
    if file_bytes < len(MAGIC) + _TRAILER.size:
        _refuse(key, f"has {file_bytes} bytes only")
    n_bytes, _, magic = _TRAILER.unpack_from(tail, tail.size - _TRAILER.size)
    if magic != MAGIC or n_bytes > file_bytes - len(MAGIC) - _TRAILER.size:
        _refuse(key, "is damaged or cut off at its end")
    return int(n_bytes)


def _summary(layout: Layout, epoch: str, number: int, tail: pa.Buffer, file_bytes: int) -> Summary:
    key = _key(layout, epoch, number)
    n_bytes = _summary_bytes(key, tail, file_bytes)
    end = tail.size - _TRAILER.size
    document = tail[end - n_bytes : end]
    _, crc32, _ = _TRAILER.unpack_from(tail, end)
    if zlib.crc32(document) != crc32:
        _refuse(key, "is damaged: its summary differs from what was written")
    summary = summary_from_json(document, layout, epoch, number, key)
    if _file_bytes(summary, n_bytes) != file_bytes:
        _refuse(key, f"has {file_bytes} bytes, which is not what was written")
    return summary


def _refuse(key: str, reason: str) -> NoReturn:
    raise _corrupt(key, reason)


def _corrupt(key: str, reason: str) -> SegmentCorrupt:
    return SegmentCorrupt(f"journal file {key!r} {reason}", remedy=REMEDY)
