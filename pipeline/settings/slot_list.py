"""``[[slots]]`` of a settings file: one ``Config`` for each slot of a run.

A run of several slots has one Spark session and one cap on buffers. So a few settings are the run's, and two slots may
not get into each other's way. Called by the command line; in Python each slot is a ``ChangeStream`` of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.local_paths import overlap

RUN_SETTINGS = frozenset(
    {"buffers_max", "log_format", "metrics_address", "spark", "spark_conf", "status_address", "storage_mode"}
)
"""Settings of the whole run, because it has one Ray, one Spark session, one log, one cap on buffers, one umask and one
status page. All settings whose names begin with ``spark_`` belong to them, too."""


def configs_of(values: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Config, ...]:
    """One Config for each entry of ``values["slots"]``, or a single one where there is no such list.

    ``values`` come from a file. ``options`` come from the command line and win over the file; ``slot`` among them
    chooses the entry of that name. Raises ConfigError as ``Config.of`` does, and for slots that cannot be in one run.
    """
    common = {key.replace("-", "_"): value for key, value in values.items() if key != "slots"}
    if "slots" not in values:
        return (Config.of({**common, **options}),)
    entries = values["slots"]
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise ConfigError("slots must be a list of tables: [[slots]] in the file")
    if "slot" in common:
        raise ConfigError("slot is given beside [[slots]]", remedy="move it into a [[slots]] of its own")
    configs = []
    for entry in entries:
        own = {key.replace("-", "_"): value for key, value in entry.items()}
        of_run = sorted(k for k in own if k in RUN_SETTINGS or k.startswith("spark_"))
        if of_run:
            raise ConfigError(f"{of_run[0]} is for the whole run", remedy="move it out of [[slots]]")
        configs.append(Config.of({**common, **own, **{k: v for k, v in options.items() if k != "slot"}}))
    chosen = options.get("slot")
    if chosen is not None:
        configs = [config for config in configs if config.slot == chosen]
        if not configs:
            raise ConfigError(f"no [[slots]] of the file is named {chosen!r}")
    _refuse_clashes(configs)
    return tuple(configs)


def _refuse_clashes(configs: Sequence[Config]) -> None:
    for config in configs:
        config.require("slot")
    if len({config.slot for config in configs}) < len(configs):
        raise ConfigError("two of [[slots]] have the same slot", remedy="give each a name of its own")
    floors = sum(config.buffers_min for config in configs)
    if floors > configs[0].buffers_max:
        raise ConfigError(
            f"buffers_max ({configs[0].buffers_max}) is below buffers_min of all slots together ({floors})",
            remedy="raise buffers_max: it is the cap of the whole run",
        )
    roots = [config.sink_root for config in configs if config.sink_root]
    if any(overlap(one, other) for one, other in itertools.combinations(roots, 2)):
        raise ConfigError(
            "two of [[slots]] have the same sink, or one of them is in the other's",
            remedy="give each a Delta root of its own: a _transactions table holds the commits of one server",
        )
