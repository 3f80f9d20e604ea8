"""Makes the command line's options from the fields of ``Config``, and configurations from the options that were given.

So an option, a key of the TOML file and a setting of ``ChangeStream`` are one thing with one name, one default and one
sentence of help. An option that was not given stays out, so that the file's value counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from xidstream.pipeline.config import Config, configs_of, load_toml
from xidstream.pipeline.errors import ConfigError

_STRUCTURED = {"spark_conf"}


def setting_options(*names: str) -> Callable[[Any], Any]:
    """Click options for these settings of Config, or for all settings. An option that was not given is None."""
    fields = [f for f in dataclasses.fields(Config) if f.name not in _STRUCTURED]
    chosen = [f for f in fields if not names or f.name in names]

    def decorate(command: Any) -> Any:
        for f in reversed(chosen):
            flag = f"--{f.name.replace('_', '-')}"
            default = "" if f.default in ("", (), None, False) else f"  [default: {_shown(f)}]"
            text = f.metadata["help"] + default
            if isinstance(f.default, bool):
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
    if f.metadata.get("size"):
        return str
    if f.name == "streaming":
        return click.Choice(["off", "on", "parallel"])
    if isinstance(f.default, int) or f.name == "proto_version":
        return int
    return float if isinstance(f.default, float) else str


def _metavar(f: dataclasses.Field[Any]) -> str | None:
    if f.metadata.get("size"):
        return "SIZE"
    return {"publication": "NAME[,…]", "storage": "URI", "sink": "SINK", "proto_version": "1-4"}.get(f.name)


def _shown(f: dataclasses.Field[Any]) -> str:
    if f.metadata.get("size"):
        return f"{int(str(f.default)) >> 20}MB"
    return str(f.default)


def build_configs(config_file: Path | None, options: dict[str, Any]) -> tuple[Config, ...]:
    """The file's settings, overridden by the options that were given; several if the file has ``[[slots]]``."""
    values = load_toml(config_file) if config_file is not None else {}
    return configs_of(values, {name: value for name, value in options.items() if value is not None})


def build_config(config_file: Path | None, options: dict[str, Any]) -> Config:
    """The same for a command that is about one slot. Raises ConfigError if the file has several."""
    config, *others = build_configs(config_file, options)
    if others:
        names = ", ".join(c.slot for c in (config, *others))
        raise ConfigError(f"the file has several slots ({names})", remedy="choose one with --slot")
    return config
