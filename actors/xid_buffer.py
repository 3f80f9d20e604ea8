"""The xid buffer actor: ``pipeline.transactions.transaction_buffer`` in a process of its own.

It is single-threaded, so that Ray's order of one caller's calls is the order of the stream. What it puts into the
object store belongs to this process and is gone when the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pyarrow as pa

from xidstream.actors.runtime.allocator import return_freed_memory
from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.object_store import hold_arrow
from xidstream.actors.runtime.process_facts import this_process
from xidstream.pipeline.account.model import ProcessPart
from xidstream.pipeline.exchange import Sealed
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.transactions.buffer_calls import BufferSettings, RawBlock
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer


class XidBuffer(TransactionBuffer):
    def __init__(self, settings: BufferSettings) -> None:
        # The bound on a buffer is its process's: what is freed must go back, from Arrow's allocator too.
        return_freed_memory()
        skip_pandas_import()
        choose_for_process(settings.storage_mode)
        pa.set_memory_pool(pa.system_memory_pool())
        super().__init__(settings, hold_arrow)

    def decode_and_tell(
        self, numbers: tuple[int, ...], new_versions: Mapping[int, RelationVersion], block: RawBlock
    ) -> tuple[Sealed, None]:
        """``decode_plain``, and that it is done: the reader need not read the content to see that."""
        return self.decode_plain(numbers, new_versions, block), None

    def pid(self) -> int:
        return os.getpid()

    def process(self, part: str) -> ProcessPart:
        return this_process(part)
