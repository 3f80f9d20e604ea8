"""The command line. ``python -m actors`` and the installed ``xidstream`` are the same.

The options are ``actors.cli.options``'. Ray, the JVM and numba are imported by the commands that need them: ``--help``
answers at once.

Errors that are ours end as one line and its remedy, with the exit status of ``errors.POLICY``; anything else is a
defect and says so, with the traceback only under ``--debug``.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.erase import erase
from xidstream.actors.cli.journal_group import journal
from xidstream.actors.cli.json_log import logs_json
from xidstream.actors.cli.log_group import consumer, tables
from xidstream.actors.cli.options import (
    CAPTURE_SETTINGS,
    RunCommand,
    build_config,
    build_configs,
    setting_options,
)
from xidstream.actors.cli.resync import resync
from xidstream.actors.cli.source_group import source
from xidstream.actors.cli.table_group import table
from xidstream.actors.cli.typed_names import help_, start, stop, version
from xidstream.actors.cli.verify_options import verify
from xidstream.actors.runtime.signals import StopRequest
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.pipeline.errors import ExitStatus, XidstreamError
from xidstream.pipeline.events import Event, of_error
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.settings.config import Config

_CONNECTION = ("dsn", "slot", "publication")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(None, "-V", "--version", package_name="xidstream")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """PostgreSQL transactions in Spark the moment they commit, however big they are.

    Start with `xidstream demo`, which needs nothing but what `pip install 'xidstream[demo]'` adds. Then `xidstream
    check` tells what your server still lacks, and `xidstream run` does the work.
    """
    context.obj = debug


@cli.command(short_help="Show the whole path on embedded servers.")
@click.option(
    "--rows",
    type=click.IntRange(1_000),
    default=400_000,
    show_default=True,
    help="Rows of the large transaction.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the Delta tables; what an earlier demo left there is replaced.",
)
def demo(rows: int, output: Path) -> None:
    """Show the whole path on an embedded PostgreSQL, a local Ray and a Spark session, in about a minute."""
    with waiting("loading"):
        from xidstream.actors.demo.show import run_demo

    run_demo(n_rows=rows, output=output)


@cli.command(cls=RunCommand, short_help="Stream a slot's transactions into a sink.")
@setting_options()
def run(config_file: Path | None, **options: Any) -> None:
    """Stream a slot's transactions into a sink, until interrupted or (--available-now) done.

    SINK is `delta:URI` (one Delta table per source table below URI), `console` (for people), or
    `foreach:module:function` (your function is called with each batch of whole transactions).

    \b
    Examples:
      xidstream run --dsn 'host=db dbname=shop user=repl' --slot shop --publication shop \\
                    --storage s3://bucket/xidstream --sink delta:s3://bucket/tables --create-slot
      PGSERVICE=shop xidstream run --config shop.toml --available-now

    A file with several [[slots]] makes one run of them, with one Spark session; one that fails does not stop the
    others, and the exit status is the worst.
    """
    configs = build_configs(config_file, options)
    for config in configs:
        config.require("slot", "publication", "storage", "sink")
    began_s = time.monotonic()
    stop = StopRequest()
    stop.listen()
    with waiting("loading"):
        from xidstream.actors.cli.run import run_pipeline

    try:
        run_pipeline(configs, stop, began_s)
    finally:
        stop.deafen()


@cli.command(cls=RunCommand, short_help="Write a slot's transactions to its journal, without Spark.")
@setting_options(*CAPTURE_SETTINGS)
def capture(config_file: Path | None, **options: Any) -> None:
    """Read a slot into its journal in the storage, until interrupted or (--available-now) done. No Spark, no sink.

    For the time while Spark or the sink is away, upgraded or broken: the slot is confirmed after the journal, so the
    server keeps no WAL for it. The next `run` with this slot and storage, on any machine, delivers the journal and
    goes on after it. A slot has one reader at a time: end the run first.

    
    Examples:
      xidstream capture --dsn 'host=db dbname=shop user=repl' --slot shop --publication shop \
                        --storage s3://bucket/xidstream
      xidstream capture --config shop.toml
    """
    configs = build_configs(config_file, options)
    for config in configs:
        config.require("slot", "publication", "storage")
    began_s = time.monotonic()
    stop = StopRequest()
    stop.listen()
    with waiting("loading"):
        from xidstream.actors.cli.run import capture_slots

    try:
        capture_slots(configs, stop, began_s)
    finally:
        stop.deafen()


@cli.command(cls=RunCommand, short_help="Tell what a run would lack, each with its remedy.")
@setting_options()
@click.option("--capture", is_flag=True, help="Of `xidstream capture`: without sink and Spark.")
def check(config_file: Path | None, capture: bool, **options: Any) -> None:
    """Preflight: every precondition of `run`, each with its remedy, and what could not be checked.

    Give it the options of the run, whatever they are: storage and sink are tried with a file that is removed again.
    `run` and `ChangeStream.start` make the same checks. Status 3 if something is missing.
    """
    configs = build_configs(config_file, options)
    for config in configs:
        config.require("slot", "publication")
    with waiting("loading"):
        from xidstream.actors.cli.checks import print_checks

    if not print_checks(configs, has_sink=not capture):
        raise SystemExit(ExitStatus.PRECONDITION)


@cli.command(short_help="Show what a run is doing, or what its slot holds back.")
@setting_options(*_CONNECTION, "storage")
@click.option("--watch", is_flag=True, help="Show it again each second, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print the account of the run as JSON, one a line.")
def status(config_file: Path | None, watch: bool, as_json: bool, **options: Any) -> None:
    """What the run of a slot is doing: open transactions, rates, what waits for what, restarts.

    Without any option: the runs of this machine, a line each. With a slot its run is found, on this machine or, with
    RAY_ADDRESS, on a Ray cluster. Where nothing runs: what the slot holds back and what the pipeline has confirmed,
    which needs --dsn. docs/status.md lists the fields of the JSON.

    Of a file with several [[slots]] each is shown, or with --slot the one of that name. One that cannot be shown does
    not hide the others, and the exit status is the worst.
    """
    if not watch and config_file is None and not any(options.values()):
        from xidstream.actors.cli.runs_here import print_runs

        print_runs(as_json=as_json)
        return
    configs = build_configs(config_file, options)
    for config in configs:
        config.require("slot")
    if watch and as_json:
        raise click.UsageError("--watch and --json are two ways to show it: give one of them")
    from xidstream.actors.cli import status as shown

    if watch:
        with suppress(KeyboardInterrupt):
            shown.watch(configs)
        return
    worst = ExitStatus.DONE
    for config in configs:
        if len(configs) > 1 and not as_json:
            click.echo(f"\nslot {config.slot}")
        try:
            shown.print_json(config) if as_json else shown.print_status(config)
        except XidstreamError as error:
            if len(configs) == 1:
                raise
            worst = max(worst, error.policy.exit_status)
            _tell(error.message, error.remedy)
    if worst:
        raise SystemExit(worst)


@cli.command(short_help="Bring base tables beside the sink's change log up to it.")
@setting_options(
    "sink",
    "slot",
    "mirror_file_bytes",
    "mirror_retention",
    *(f.name for f in dataclasses.fields(Config) if f.name == "spark" or f.name.startswith("spark_")),
)
@click.option("--every", metavar="TIME", help="Go on, and refresh so often (60s), until interrupted.")
@click.option(
    "--vacuum/--no-vacuum",
    default=None,
    help="Then remove what no reader needs within --mirror-retention, or remove nothing.  [default: vacuum]",
)
@click.option(
    "--catalog",
    metavar="glue:DATABASE",
    help="Then register the tables in this AWS Glue database, for Athena, Trino and Spark.",
)
def mirror(
    config_file: Path | None, every: str | None, vacuum: bool | None, catalog: str | None, **options: Any
) -> None:
    """Bring the base tables of a Delta or Iceberg sink up to its change log: plain tables that any engine reads.

    They are below URI/current, or in the namespace NAMESPACE_current of the catalog, one for each table that has a
    snapshot, with its own columns alone. All are at one commit, and the table _manifest there names the versions that
    belong together. Only files with changed keys are written anew. It needs the sink's folder, store or catalog, and
    no server. --slot tells which log, where several slots write to it.

    A slot's base tables have one mirror at a time: the one that began last. `run --mirror-every` is one, too.
    """
    given = {"mirror_every": every, "mirror_vacuum": vacuum, "mirror_catalog": catalog}
    config = build_config(config_file, {**options, **given})
    config.require("sink")
    stop = StopRequest()
    stop.listen()
    with waiting("loading"):
        from xidstream.actors.cli.mirror import mirror_command

    try:
        mirror_command(config, stop)
    finally:
        stop.deafen()


@cli.group(short_help="Create or drop a slot, or give up a transaction.")
def slot() -> None:
    """Create or drop a replication slot, or give up one of its transactions."""


@slot.command()
@setting_options("dsn", "slot", "two_phase", "failover", "storage", "sink")
def create(config_file: Path | None, **options: Any) -> None:
    """Create the slot; changes are kept by the server from then on.

    Given --storage, it refuses where that still has the record of an earlier slot of this name: a run would take
    the new slot for one that lost changes. `slot drop --storage` removes it. Given --sink, it says what the Delta
    tables will lack if they have transactions of an earlier slot of this name.
    """
    config = build_config(config_file, options)
    config.require("slot")
    from xidstream.actors.cli.checks import create_slot_command

    create_slot_command(config)


@slot.command(short_help="Drop the slot, and with it what was not read yet.")
@setting_options("dsn", "slot", "storage")
@click.option("--discard-journal", is_flag=True, help="Also where the journal has what no sink holds.")
def drop(config_file: Path | None, discard_journal: bool, **options: Any) -> None:
    """Drop the slot; changes that were not read from it are gone for this pipeline.

    Given --storage, also remove what the pipeline recorded of the slot there (progress/, prepared/, journal/,
    epochs/, skipped/ and resumed/ below SYSTEM_IDENTIFIER/SLOT), without which a slot created again under this name
    counts as lost. Nothing in the sink is touched. It works for a slot that is dropped already, too.
    """
    config = build_config(config_file, options)
    config.require("slot")
    from xidstream.actors.cli.checks import drop_slot_command

    drop_slot_command(config, discard_journal=discard_journal)


@slot.command(short_help="Give up one transaction that cannot be delivered.")
@setting_options("dsn", "slot", "storage")
@click.option(
    "--xid", type=click.IntRange(1), required=True, help="The transaction's id, as the error named it."
)
@click.option("--commit-lsn", required=True, metavar="X/Y", help="Its commit LSN, as the error named it.")
@click.option("--reason", default="", help="For whoever reads the record later.")
def skip(config_file: Path | None, xid: int, commit_lsn: str, reason: str, **options: Any) -> None:
    """Give up one transaction that cannot be delivered, so that the next run goes on after it.

    The run that ended with status 4 (or 3, for a column's name) has named the transaction. It is given up as a whole:
    none of its changes is delivered, to no table. What was given up is recorded in --storage, and `status` lists it. A
    transaction that does not have both this xid and this commit LSN is not touched.
    """
    config = build_config(config_file, options)
    config.require("slot", "storage")
    from xidstream.actors.cli.checks import skip_command

    skip_command(config, Xid(xid), Lsn.parse(commit_lsn), reason)


@cli.group(short_help="Ask for the rows that tables had before the stream.")
def snapshot() -> None:
    """Ask for snapshots of tables, do without them, or show what there is.

    A run with `snapshot = initial` takes all published tables by itself. These commands are for a table that is to be
    taken again, or alone, or not. They need the server and the storage; the run takes the snapshot.
    """


_TABLES = click.option(
    "--table",
    "tables",
    multiple=True,
    required=True,
    metavar="SCHEMA.TABLE",
    help="Repeat it for several tables.",
)


@snapshot.command("request")
@setting_options(*_CONNECTION, "storage", "sink")
@_TABLES
@click.option(
    "--where",
    metavar="CONDITIONS",
    help="Read only these rows from the source, such as 'id between 100 and 200', and carry the others over.",
)
def snapshot_request(
    config_file: Path | None, tables: tuple[str, ...], where: str | None, **options: Any
) -> None:
    """Ask for a new snapshot of a table: its next generation.

    The run of the slot takes it within seconds, or when it starts. The rows of the last generation stay in the table;
    whoever folds the log goes on from the new one.

    With --where the rows of a key range are repaired: they alone are read from the source, and the log has the others.
    The conditions are on columns of the table's key, with =, <, <=, >, >=, BETWEEN or IN, joined by AND.
    """
    config = build_config(config_file, options)
    config.require("slot", "publication", "storage")
    from xidstream.actors.cli.snapshots import request_command

    request_command(config, tables, where)


@snapshot.command("cancel")
@setting_options(*_CONNECTION, "storage")
@_TABLES
def snapshot_cancel(config_file: Path | None, tables: tuple[str, ...], **options: Any) -> None:
    """Give up the snapshot of a table that is asked for, waits or is being taken."""
    config = build_config(config_file, options)
    config.require("slot", "publication", "storage")
    from xidstream.actors.cli.snapshots import cancel_command

    cancel_command(config, tables)


@snapshot.command("status")
@setting_options(*_CONNECTION, "storage", "sink")
def snapshot_status(config_file: Path | None, **options: Any) -> None:
    """The published tables, their sizes, and how far their snapshots are: by the run, the storage and the sink."""
    config = build_config(config_file, options)
    config.require("slot", "publication", "storage")
    from xidstream.actors.cli.snapshots import status_command

    status_command(config)


for each in (journal, source, table, tables, consumer, verify, erase, resync, version, help_, start, stop):
    cli.add_command(each)


def main(arguments: list[str] | None = None) -> None:
    """The entry point: runs a command and turns its end into an exit status."""
    debug = "--debug" in (arguments if arguments is not None else sys.argv[1:])
    try:
        cli.main(args=arguments, prog_name="xidstream", standalone_mode=False)
        code = int(ExitStatus.DONE)
    except XidstreamError as error:
        code = int(error.policy.exit_status)
        _tell(error.message, error.remedy, error)
        if debug:
            traceback.print_exc()
    except click.UsageError as error:
        code = int(ExitStatus.USAGE)
        error.show()
    except click.ClickException as error:
        code = int(ExitStatus.FAILED)
        error.show()
    except SystemExit as error:
        code = int(error.code or 0)
    except (KeyboardInterrupt, click.Abort):
        code = 130
        _tell("interrupted", "start again: nothing that was not confirmed is lost")
    except Exception as error:  # noqa: BLE001 - the last border: a person gets one line
        code = int(ExitStatus.FAILED)
        _tell(
            f"the command ended with an unexpected {type(error).__name__}",
            "`xidstream --debug COMMAND …` shows the traceback: please report it",
        )
        if debug:
            traceback.print_exc()
    sys.stdout.flush()
    raise SystemExit(code)


def _tell(message: str, remedy: str, error: XidstreamError | None = None) -> None:
    if logs_json():
        failed_event = Event("failed", message, logging.ERROR, remedy=remedy)
        logging.getLogger("xidstream").error(
            failed_event if error is None else of_error("failed", message, error)
        )
        return
    click.echo(f"xidstream: {message}", err=True)
    click.echo(f"  remedy: {remedy}", err=True)
