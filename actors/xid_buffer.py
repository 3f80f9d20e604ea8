"""The xid buffer actor: ``pipeline.stages.transaction_buffer`` in a process of its own.

It is single-threaded, so that Ray's order of one caller's calls is the order of the stream. What it puts into the
object store belongs to this process and is gone when the process ends.
"""

from __future__ import annotations

import os

import pyarrow as pa

from xidstream.actors.runtime.allocator import return_freed_memory
from xidstream.actors.runtime.object_store import put_arrow
from xidstream.actors.runtime.pandas_unasked import leave_out_pandas
from xidstream.actors.runtime.process_facts import this_process
from xidstream.pipeline.account.model import ProcessPart
from xidstream.pipeline.file_modes import choose_for_process
from xidstream.pipeline.stages.buffer_calls import BufferSettings
from xidstream.pipeline.stages.transaction_buffer import TransactionBuffer


class XidBuffer(TransactionBuffer):
    def __init__(self, settings: BufferSettings) -> None:
        # The bound on a buffer is its process's: what is freed must go back, from Arrow's allocator too.
        return_freed_memory()
        leave_out_pandas()
        choose_for_process(settings.storage_mode)
        pa.set_memory_pool(pa.system_memory_pool())
        super().__init__(settings, put_arrow)

    def pid(self) -> int:
        return os.getpid()

    def process(self, part: str) -> ProcessPart:
        return this_process(part)
