"""Makes the command line's options from the fields of ``Config``, and configurations from the options that were given.

So an option, a key of the TOML file and a setting of ``ChangeStream`` are one thing with one name, one default and one
sentence of help. An option that was not given stays out, so that the file's value counts.

``SECTIONS`` is the order and the grouping of ``run --help``, and says which settings only ``--help-all`` shows. It is
not in ``Config``, because only a screen needs it. A test keeps it complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings import file_modes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.settings_file import load_toml
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.settings.times import time_text

_STRUCTURED = {"spark_conf"}
_METAVARS: Final = {
    "dsn": "DSN",
    "password_command": "COMMAND",
    "slot": "NAME",
    "publication": "NAME[,…]",
    "column_names": "COLUMN=NAME[,…]",
    "storage": "URI",
    "sink": "SINK",
    "snapshot": "initial|only|never",
    "proto_version": "1-4",
    "begin_anew": "LSN",
    "metrics_address": "HOST:PORT",
    "status_address": "HOST:PORT|off",
    "log_format": "text|json",
    "on_poison": "stop|park",
    "on_slot_lost": "stop|resync",
    "logical_decoding_work_mem": "SIZE",
    "spark": "auto|local|raydp",
    "spark_executor_memory": "SIZE",
    "mirror_every": "TIME",
    "mirror_retention": "TIME",
    "mirror_catalog": "glue:DATABASE",
    "log_retention": "TIME|SIZE|base",
    "log_layout": "PATTERN=COLUMN",
    "delta_log_retention": "TIME",
    "delta_file_retention": "TIME",
    "iceberg_commit_every": "TIME",
}

SECTIONS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "Source": (
        (
            "dsn",
            "password_command",
            "slot",
            "publication",
            "create_slot",
            "available_now",
            "two_phase",
            "failover",
            "streaming",
            "logical_decoding_work_mem",
            "on_poison",
            "on_slot_lost",
        ),
        (
            "column_names",
            "proto_version",
            "begin_anew",
            "status_interval_ms",
            "receive_timeout_ms",
            "heartbeat_interval_s",
        ),
    ),
    "Sink": (
        ("sink", "storage"),
        (
            "storage_mode",
            "log_retention",
            "log_layout",
            "delta_log_retention",
            "delta_file_retention",
            "iceberg_commit_every",
        ),
    ),
    "Journal": (("journal_max_bytes",), ("journal_after_bytes", "journal_after_s")),
    "Snapshots": (("snapshot", "snapshot_connections"), ("snapshot_bytes_per_s",)),
    "Mirror": (
        ("mirror_every", "mirror_vacuum"),
        ("mirror_retention", "mirror_file_bytes", "mirror_catalog"),
    ),
    "Latency": (("linger_ms", "batch_rows"), ("stream_linger_ms", "block_bytes")),
    "Memory": (
        ("buffer_memory_bytes", "buffers_max", "backlog_bytes", "batch_bytes"),
        ("reader_memory_bytes", "buffers_min", "buffers_idle_s", "buffer_cpus", "buffer_resource"),
    ),
    "Status": (("status_address", "log_format"), ("metrics_address",)),
    "Spark": (
        ("spark", "spark_executors", "spark_executors_max", "spark_executor_cores", "spark_executor_memory"),
        ("spark_executors_idle_s", "spark_executor_cpus"),
    ),
}
"""Title → the settings that ``--help`` shows, and those that only ``--help-all`` adds."""

CAPTURE_SETTINGS: Final = tuple(
    name
    for title, (usual, expert) in SECTIONS.items()
    if title not in ("Mirror", "Spark")
    for name in usual + expert
    if name
    not in (
        "sink",
        "log_retention",
        "log_layout",
        "delta_log_retention",
        "delta_file_retention",
        "iceberg_commit_every",
        "on_slot_lost",
        "batch_rows",
        "batch_bytes",
        "snapshot_connections",
        "snapshot_bytes_per_s",
    )
)
"""The settings of a run without a sink."""


class RunCommand(click.Command):
    """A command with all settings, or most of them.

    ``--help`` shows the most important ones by section, ``--help-all`` all that it has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show this message with every setting, and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {parameter.name: parameter for parameter in self.get_params(ctx)}
        n_left_out = 0
        for title, (usual, expert) in SECTIONS.items():
            shown = usual + expert if ctx.meta.get(_ALL) else usual
            n_left_out += sum(name in options for name in usual + expert if name not in shown)
            _write(ctx, formatter, title, [options.pop(name) for name in shown if name in options])
        settings = {name for usual, expert in SECTIONS.values() for name in usual + expert}
        _write(
            ctx, formatter, "General", [option for name, option in options.items() if name not in settings]
        )
        if n_left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{n_left_out} more settings: `{ctx.command_path} --help-all`.")


_ALL: Final = "xidstream.help_all"


def _show_all(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _write(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: list[click.Parameter]
) -> None:
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if not records:
        return
    with formatter.section(title):
        formatter.write_dl(records)


def setting_options(*names: str) -> Callable[[Any], Any]:
    """Click options for these settings of Config, or for all settings. An option that was not given is None. Whoever
    takes a DSN takes a password command, too."""
    if "dsn" in names:
        names += ("password_command",)
    fields = [f for f in dataclasses.fields(Config) if f.name not in _STRUCTURED]
    chosen = [f for f in fields if not names or f.name in names]

    def decorate(command: Any) -> Any:
        for f in reversed(chosen):
            flag = f"--{f.name.replace('_', '-')}"
            default = "" if f.default in ("", (), None, False) else f"  [default: {_shown(f)}]"
            text = f.metadata["help"] + default
            if isinstance(f.default, bool):
                if f.default:
                    flag += f"/--no-{f.name.replace('_', '-')}"
                command = click.option(flag, f.name, is_flag=True, default=None, help=text)(command)
            else:
                command = click.option(
                    flag, f.name, type=_click_type(f), default=None, help=text, metavar=_metavar(f)
                )(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            help="TOML file with any of these settings",
        )(command)

    return decorate


def _click_type(f: dataclasses.Field[Any]) -> Any:
    if f.metadata.get("size") or f.metadata.get("time"):
        return str
    if f.name == "streaming":
        return click.Choice(["off", "on", "parallel"])
    if isinstance(f.default, int) or f.default is None:
        return int
    return float if isinstance(f.default, float) else str


def _metavar(f: dataclasses.Field[Any]) -> str | None:
    if f.metadata.get("size"):
        return "SIZE"
    if f.metadata.get("time"):
        return "TIME"
    return _METAVARS.get(f.name)


def _shown(f: dataclasses.Field[Any]) -> str:
    if f.metadata.get("size"):
        return f"{int(str(f.default)) >> 20}MB"
    return time_text(float(str(f.default)), f.name) if f.metadata.get("time") else str(f.default)


def build_configs(config_file: Path | None, options: dict[str, Any]) -> tuple[Config, ...]:
    """The file's settings, overridden by the options that were given; several if the file has ``[[slots]]``."""
    values = load_toml(config_file) if config_file is not None else {}
    configs = configs_of(values, {name: value for name, value in options.items() if value is not None})
    file_modes.choose(configs[0].storage_mode)
    return configs


def build_config(config_file: Path | None, options: dict[str, Any]) -> Config:
    """The configuration for a command that is about one slot. Raises ConfigError if the file has several."""
    config, *others = build_configs(config_file, options)
    if others:
        names = ", ".join(c.slot for c in (config, *others))
        raise ConfigError(f"the file has several slots ({names})", remedy="choose one with --slot")
    return config
