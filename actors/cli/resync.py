"""``xidstream resync``: a slot that was lost is put right, and the next run reads the tables again.

Lost is a slot that the server has invalidated, that somebody dropped, that a failover has left behind, or that somebody
else has read. What committed since then is in no WAL that can be read, so only new snapshots heal the tables. The
change log keeps what it has below: what is missing between is told, and stays missing in the history.

Everything that a run would refuse is found before anything is changed: rights on the tables, another reader, a sink of
another server, a journal with what no sink holds. Then, in this order: the lost slot is dropped, its record removed,
the decision for snapshots recorded, the new slot made, and its beginning recorded. If the command dies in between, the
same command goes on: a slot that is not there is as lost as an invalidated one.

A slot that the server still has is not dropped where the storage has no record of it: then the storage may be the wrong
one, and the slot is what is left. The run's own error says so.

A run does the same at its start, where it is told to (``on_slot_lost``). A slot that is well is refused: a table that
is to be read again is `snapshot request`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options
from xidstream.pipeline.settings.config import Config


@click.command(short_help="Put a lost slot right, and have the tables read again.")
@setting_options("dsn", "slot", "publication", "storage", "sink", "two_phase", "failover")
@click.option("--discard-journal", is_flag=True, help="Also where the journal has what no sink holds.")
def resync(config_file: Path | None, discard_journal: bool, **options: Any) -> None:
    """Make a lost slot anew, under its name and in its storage; the next run takes new snapshots of all tables.

    Lost is a slot that the server has invalidated, that was dropped, or that a failover left behind. What committed
    between is in no table: the log keeps what it had, the gap is told, and the snapshots bring the tables up to date.
    Nothing is changed where something is missing first, and a slot that is well is refused.
    """
    config = build_config(config_file, options)
    config.require("slot", "publication", "storage")
    resync_command(config, discard_journal=discard_journal)


def resync_command(
    config: Config, *, discard_journal: bool, tell: Callable[[str], None] = click.echo
) -> None:
    """Raises UsageError for a slot that is well, PreconditionMissing for a journal with undelivered transactions, and
    what the preflight finds, all with nothing changed."""
    from xidstream.actors.cli.checks import (
        check_nothing_lost,
        create_slot_command,
        drop_slot_command,
        stored_slot,
    )
    from xidstream.actors.preflight import findings_of
    from xidstream.pipeline.errors import SlotLost, UsageError
    from xidstream.pipeline.findings import Status
    from xidstream.pipeline.postgres.admin import describe_slot, sql_connection
    from xidstream.pipeline.postgres.login import login_of
    from xidstream.pipeline.postgres.snapshot_sources import survey
    from xidstream.pipeline.snapshot.decision import Decision
    from xidstream.pipeline.storage.cleanup import holds_slot
    from xidstream.pipeline.storage.snapshot_record import write_decision

    asked = dataclasses.replace(config, create_slot=True, snapshot="initial")
    failed = [f for f in findings_of(asked, has_sink=bool(config.sink)) if f.status is Status.FAILED]
    others = [f for f in failed if f.raises is not SlotLost]
    if others:
        raise others[0].error()
    slot = describe_slot(login_of(config), config.slot)
    exists = slot.exists
    if exists and not failed:
        raise UsageError(
            f"slot {config.slot} is not lost: a run continues from its position",
            remedy="for a table that is to be read again: `xidstream snapshot request --table SCHEMA.TABLE`",
        )
    stored = stored_slot(config)
    if exists and not slot.is_lost and not holds_slot(*stored):
        # The record may be elsewhere: a volume that is not mounted, another folder. The slot must not go for that.
        raise failed[0].error()
    if not discard_journal:
        check_nothing_lost(config, *stored)
    for finding in failed:
        tell(f"lost: {finding.statement}")
    if exists or holds_slot(*stored):
        drop_slot_command(config, discard_journal=True, tell=tell)
    with sql_connection(login_of(config), "the published tables") as sql:
        published = {s.relation.relid: s.published_as for s in survey(sql, config.publication)}
    write_decision(*stored, Decision(takes_snapshots=True, published=published))
    create_slot_command(config, tell=tell)
    tell("the next run takes new snapshots of all published tables; what is in the sink stays")
