"""What a reader found when it opened a slot, for tests of whoever is told."""

from __future__ import annotations

from xidstream.pipeline.exchange import Opened, PrepareCover, SlotIdentity
from xidstream.pipeline.pg import Lsn


def opened_at(
    confirmed: int, target: int, *, identity: SlotIdentity | None = None, two_phase: bool = True
) -> Opened:
    return Opened(
        identity=SlotIdentity(1, "d", "s") if identity is None else identity,
        confirmed_flush_lsn=Lsn(confirmed),
        target_lsn=Lsn(target),
        server_version=180_004,
        proto_version=4,
        streaming="on",
        two_phase=two_phase,
        cover=PrepareCover(),
        timeline=1,
        history={},
    )
