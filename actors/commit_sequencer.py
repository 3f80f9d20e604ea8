"""The commit sequencer actor: ``pipeline.commits.commit_sequence`` in a process of its own.

What its entries wait for are Ray's references to what buffers return; the reader is an actor's handle.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.object_store import get_arrow, put_arrow
from xidstream.actors.runtime.process_facts import this_process
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.account.model import SequencerReport
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.exchange import Opened, Sealed
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.stream.event_router import OrderedEvent


class CommitSequencer(CommitSequence):
    def __init__(self, config: Config, epoch: str) -> None:
        skip_pandas_import()
        choose_for_process(config.storage_mode)
        super().__init__(config, epoch, lambda error: unwrap(error, "xid buffer"), get_arrow, put_arrow)

    async def open(self, reader: Any, opened: Opened, target_lsn: Lsn | None, has_sink: bool = True) -> None:
        """``CommitSequence.open`` with the handle of the reader."""
        await super().open(reader.feedback.remote, opened, target_lsn, has_sink)

    async def submit_with(self, entry: OrderedEvent, content: Sealed) -> int:
        """``CommitSequence.submit`` of one entry with its content."""
        return await self.submit([dataclasses.replace(entry, result=content)])

    async def account(self, *, with_prepared: bool) -> SequencerReport | None:
        """``CommitSequence.account`` with this process."""
        report = await super().account(with_prepared=with_prepared)
        return (
            None if report is None else dataclasses.replace(report, process=this_process("commit sequencer"))
        )

    def pid(self) -> int:
        return os.getpid()
