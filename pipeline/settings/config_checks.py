"""Which values settings may have, and which of them go together.

``Config`` calls it at its end of construction, when each value has its type, sizes are numbers, and paths are absolute.
What is wrong is a ConfigError with the setting's name and the values that are allowed. A range that one setting has by
itself stands beside it, in its metadata, where ``--help`` and docs/settings.md find it; all else is here.

Rejected: a rule in the metadata of each setting. Most rules here are about two settings, and would stand at either one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from xidstream.pipeline.errors import ConfigError, UsageError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import Streaming, check_slot_name, check_stream_options, work_mem
from xidstream.pipeline.settings.addresses import host_and_port
from xidstream.pipeline.settings.catalog_names import CatalogName
from xidstream.pipeline.settings.file_modes import check_mode
from xidstream.pipeline.settings.modes import SnapshotMode, SparkMode
from xidstream.pipeline.settings.sizes import check_executor_memory
from xidstream.pipeline.settings.times import duration_s

if TYPE_CHECKING:
    from xidstream.pipeline.settings.config import Config


def check_values(config: Config) -> None:
    """Raise ConfigError for the first value that is not allowed, alone or beside another."""
    if config.slot:
        check_slot_name(config.slot)
    if config.streaming not in [each.value for each in Streaming]:
        raise ConfigError(f"streaming must be off, on or parallel, got {config.streaming!r}")
    if config.snapshot and config.snapshot not in [each.value for each in SnapshotMode]:
        raise ConfigError(f"snapshot must be initial, only or never, got {config.snapshot!r}")
    if config.spark not in [each.value for each in SparkMode]:
        raise ConfigError(f"spark must be auto, local or raydp, got {config.spark!r}")
    if config.on_slot_lost not in ("stop", "resync"):
        raise ConfigError(f"on_slot_lost must be stop or resync, got {config.on_slot_lost!r}")
    if config.on_slot_lost == "resync" and config.snapshot in (
        SnapshotMode.NEVER.value,
        SnapshotMode.ONLY.value,
    ):
        raise ConfigError(
            f"on_slot_lost = resync takes new snapshots of all tables, and snapshot is {config.snapshot}",
            remedy="leave snapshot out, or give initial",
        )
    if config.on_poison not in ("stop", "park"):
        raise ConfigError(f"on_poison must be stop or park, got {config.on_poison!r}")
    if config.log_format not in ("text", "json"):
        raise ConfigError(f"log_format must be text or json, got {config.log_format!r}")
    check_mode(config.storage_mode)
    if config.status_address not in ("", "off"):
        host_and_port(config.status_address, "status_address")
    if config.metrics_address:
        host_and_port(config.metrics_address, "metrics_address")
    check_stream_options(Streaming(config.streaming), config.proto_version, two_phase=config.two_phase)
    work_mem(config.logical_decoding_work_mem)
    if config.begin_anew:
        try:
            Lsn.parse(config.begin_anew)
        except UsageError as error:
            raise ConfigError(
                f"begin_anew: {error.message}", remedy="give the LSN that the error names"
            ) from None
    if config.mirror_every and not 1 <= duration_s(config.mirror_every, "mirror_every") <= 86_400:
        raise ConfigError(f"mirror_every must be from 1s to 1d, got {config.mirror_every!r}")
    if not 60 <= duration_s(config.mirror_retention, "mirror_retention") <= 86_400 * 366:
        raise ConfigError(f"mirror_retention must be from 1min to 366d, got {config.mirror_retention!r}")
    CatalogName.parse(config.mirror_catalog)
    if config.log_layout and config.sink_kind.is_log and not config.sink_kind.orders_rows:
        raise ConfigError(
            f"log_layout is for a Delta sink: merges of small files of {config.sink_kind.name} tables order no rows",
            remedy="leave log_layout out, or give --sink delta:URI; docs/iceberg.md says what may be done instead",
        )
    if not 0 <= config.sink_settings.commit_every_s <= 10:  # the end of a run waits for the batch in hand
        raise ConfigError(f"iceberg_commit_every must be from 0s to 10s, got {config.iceberg_commit_every!r}")
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.metadata.get("within") and not (value is None and f.default is None):
            _check_within(f.name, value, *f.metadata["within"])
    if config.buffer_resource in ("CPU", "GPU", "memory", "object_store_memory"):
        raise ConfigError(
            f"buffer_resource must be a custom resource, not Ray's own {config.buffer_resource}"
        )
    if config.buffers_max < config.buffers_min:
        raise ConfigError(f"buffers_max ({config.buffers_max}) is below buffers_min ({config.buffers_min})")
    if 0 < config.heartbeat_interval_s < 0.1:
        raise ConfigError(
            f"heartbeat_interval_s must be 0 or at least 0.1, got {config.heartbeat_interval_s}"
        )
    if config.reader_memory_bytes < 2 * config.block_bytes:
        raise ConfigError("reader_memory_bytes must hold at least two blocks (block_bytes)")
    if 0 < config.receive_timeout_ms < 2 * config.status_interval_ms:
        # The server is asked once in an interval: two of them are the least that tells a slow one from a lost one.
        raise ConfigError(
            f"receive_timeout_ms ({config.receive_timeout_ms}) is below two intervals of status_interval_ms "
            f"({config.status_interval_ms})",
            remedy=f"raise it to {2 * config.status_interval_ms} or more, or lower status_interval_ms; with 0 the "
            "server may stay silent for ever",
        )
    check_executor_memory(config.spark_executor_memory, "spark_executor_memory")


def _check_within(name: str, value: Any, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be from {least} to {most}, got {value!r}")
