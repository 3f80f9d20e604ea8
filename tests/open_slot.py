"""A slot that is connected and started at once, for whoever has nothing to prepare between the two steps."""

from __future__ import annotations

from xidstream.pipeline.postgres.opening import OpenSlot, connect_slot
from xidstream.pipeline.postgres.settings import SlotSettings


def open_slot(settings: SlotSettings, *, create: bool) -> OpenSlot:
    slot = connect_slot(settings, create=create)
    try:
        slot.start()
    except BaseException:
        slot.connection.close()
        raise
    return slot
