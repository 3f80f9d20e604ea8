"""The sequencer's shell as a plain object: what it says before it has a slot."""

from __future__ import annotations

import asyncio

from xidstream.actors.commit_sequencer import CommitSequencer
from xidstream.pipeline.config import Config


def test_there_are_no_figures_before_the_slot_is_open() -> None:
    """They once showed 0/0 as confirmed while the slot was still being made: a user's transaction came too early."""

    async def ask() -> object:
        return await CommitSequencer(Config(), "e").stats()

    assert asyncio.run(ask()) is None
