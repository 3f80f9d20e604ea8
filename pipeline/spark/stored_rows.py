"""What Spark's executors run to read rows that the driver has put into the storage (``actors.driver.stored_frames``).

These are like the functions of ``released``: for ``mapInArrow`` over ``spark.range``, and streamed record batch by
record batch. The rows are in the contract's layout already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class StoredRows:
    """The rows of one DataFrame. The numbers that come in are indexes into ``objects``. ``read`` must pickle."""

    read: Callable[[Any], Iterator[pa.RecordBatch]]
    objects: tuple[Any, ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.read(self.objects[number])


@dataclass(frozen=True)
class ReadProbe:
    """Reads one object, whatever comes in. So it shows whether an executor has this package and reaches the storage."""

    read: Callable[[Any], Iterator[pa.RecordBatch]]
    probe: Any

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for _ in self.read(self.probe):
                pass
            yield batch
