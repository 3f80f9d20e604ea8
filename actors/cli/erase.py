"""``xidstream erase``: the rows of some keys out of everything that xidstream keeps, or how far erasures are.

The statuses are the command line's: 0 says that no table has such a row any more, though copies may be left that
readers need. 3 says that the sink did not get as far in time, and nothing was changed.

A signal ends it between two files. Given again with its ``--id`` it goes on, up to the same LSN.
"""

from __future__ import annotations

import datetime
import getpass
import json
import socket
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xidstream.actors.cli.options import build_config, setting_options
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.settings.config import Config

if TYPE_CHECKING:
    from xidstream.pipeline.erasure.erasing import SlotStores
    from xidstream.pipeline.storage.erasure_record import ErasureRecord


@click.command(short_help="Erase the rows of a key, everywhere.")
@setting_options("dsn", "slot", "storage", "sink")
@click.option("--table", metavar="SCHEMA.TABLE", help="The table whose rows are erased.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="CONDITIONS",
    help="A key, such as 'id = 4711' or \"tenant = 5 and email = 'a@b'\"; repeat it for several.",
)
@click.option(
    "--keys-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file of keys, one a line, each as in --key.",
)
@click.option("--id", "id_", default="", metavar="ID", help="Your name for it, such as a ticket's.")
@click.option("--reason", default="", help="For whoever reads the record later.")
@click.option(
    "--at-once",
    is_flag=True,
    help="Remove replaced files at once: readers that opened the tables before fail.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="How long to wait for the sink to have everything that is committed.",
)
@click.option(
    "--status", "shows_status", is_flag=True, help="Show all erasures, and the copies that are left."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON; with --status one a line.")
def erase(
    config_file: Path | None,
    table: str | None,
    keys: tuple[str, ...],
    keys_file: Path | None,
    id_: str,
    reason: str,
    at_once: bool,
    timeout_s: float,
    shows_status: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Erase the rows of some keys from the change log of a Delta or Iceberg sink, its base tables and the storage.

    The run goes on meanwhile. Erased is what has committed when the command begins: delete the rows in the source
    first. Files that are replaced stay for readers, as long as the tables keep such files; --status says when no copy
    is left. The record in the storage has no key's value.

    \b
    Examples:
      xidstream erase --config shop.toml --table public.users --key 'id = 4711' --id ticket-812
      xidstream erase --config shop.toml --status
    """
    config = build_config(config_file, options)
    config.require("slot", "storage", "sink")
    if shows_status:
        status_command(config, as_json=as_json)
        return
    if not table or not (keys or keys_file):
        raise click.UsageError("give --table, and --key or --keys-file; or --status")
    stop = StopRequest()
    stop.listen()
    try:
        erase_command(
            config,
            stop,
            table,
            keys,
            keys_file,
            id_=id_,
            reason=reason,
            at_once=at_once,
            timeout_s=timeout_s,
            as_json=as_json,
        )
    finally:
        stop.deafen()


def erase_command(
    config: Config,
    stop: StopRequest,
    table: str,
    keys: Sequence[str],
    keys_file: Path | None,
    *,
    id_: str,
    reason: str,
    at_once: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Raises what ``pipeline.erasure`` raises, with nothing changed where the arguments are wrong."""
    from xidstream.pipeline.erasure.erasing import ErasureSettings
    from xidstream.pipeline.erasure.erasing import erase as erase_keys
    from xidstream.pipeline.log_tables.erased_keys import parse_keys
    from xidstream.pipeline.postgres.admin import settled_flush_lsn
    from xidstream.pipeline.postgres.login import login_of
    from xidstream.pipeline.storage.envelope import now
    from xidstream.pipeline.storage.erasure_record import ErasureRecord, check_id

    wanted = parse_keys(keys, _lines(keys_file))
    asked_at = now()
    id_ = check_id(id_ or f"{asked_at:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}")
    stores = _stores(config)
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    upto = settled_flush_lsn(login_of(config))

    def check() -> None:
        if stop.asked:
            raise click.Abort

    def tell(text: str) -> None:
        if not as_json:
            click.echo(text)

    settings = ErasureSettings(at_once, timeout_s, tell=tell, check=check)
    asked = ErasureRecord(id_, table, wanted.n_keys, upto, asked_at, by, reason)
    done = erase_keys(stores, table, wanted, asked, settings)
    click.echo(json.dumps(done.to_json()) if as_json else shown(done))


def status_command(config: Config, *, as_json: bool) -> None:
    from xidstream.pipeline.erasure.erasing import look
    from xidstream.pipeline.storage.erasure_record import read_erasures

    stores = _stores(config)
    records = [look(stores, record) for record in read_erasures(stores.storage, stores.layout)]
    for record in records:
        click.echo(json.dumps(record.to_json()) if as_json else shown(record))
    if not records and not as_json:
        click.echo("nothing was erased")


def shown(record: ErasureRecord) -> str:
    """For people: what was done, and what is left."""
    from xidstream.pipeline.quantities import counted

    lines = [
        f"erasure {record.id}: {counted(record.n_keys, 'key')} of table {record.table}, up to LSN {record.upto_lsn}, "
        f"asked for at {_time(record.asked_at)} by {record.asked_by}"
        + (f" ({record.reason})" if record.reason else "")
    ]
    if record.erased_at is None:
        return f"{lines[0]}\n  not done: give the command again, with --id {record.id} and the same keys"
    lines.append(
        f"  erased at {_time(record.erased_at)}: {counted(record.n_rows, 'row')} in {counted(record.n_files, 'file')} "
        f"of the log, {counted(record.base_rows, 'row')} in {counted(record.base_files, 'file')} of the base table"
    )
    if record.n_behind:
        lines.append(
            f"  {counted(record.n_behind, 'row')} of these keys came behind that LSN, and stay: when the source has no "
            "such row any more, erase again with another --id"
        )
    if record.finished_at is not None:
        lines.append(f"  no copy is left since {_time(record.finished_at)} or earlier")
    else:
        n_copies = Counter(copy.where for copy in record.copies)
        named = ", ".join(f"{counted(n, 'file')} of the {where}" for where, n in sorted(n_copies.items()))
        lines.append(f"  copies are left, which readers may need or the sink has had by now: {named}")
    return "\n".join(lines)


def _time(moment: datetime.datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _lines(path: Path | None) -> Sequence[str]:
    from xidstream.pipeline.errors import ConfigError

    if path is None:
        return ()
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of keys {path} cannot be read: {type(error).__name__}") from None


def _stores(config: Config) -> SlotStores:
    from xidstream.actors.cli.checks import stored_slot
    from xidstream.pipeline.changelog.log_root import root_of
    from xidstream.pipeline.changelog.slot_log import SlotLog
    from xidstream.pipeline.erasure.erasing import SlotStores
    from xidstream.pipeline.errors import ConfigError
    from xidstream.pipeline.settings.file_modes import choose_for_process
    from xidstream.pipeline.sinks.sink import check_sink_spec, parse_sink_spec

    kind, _ = parse_sink_spec(config.sink)
    if not kind.erases_keys:
        raise ConfigError(
            f"erase is for the change log of a Delta or Iceberg sink, and the sink {kind.name} keeps none",
            remedy="give its root as --sink delta:URI or iceberg:CATALOG/namespace; what a function wrote is yours to "
            "erase",
        )
    check_sink_spec(config.sink)
    choose_for_process(config.storage_mode)
    storage, layout = stored_slot(config)
    return SlotStores(SlotLog(root_of(config.sink), config.slot), storage, layout)
