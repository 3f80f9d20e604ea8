"""Makes the tables and plots of docs/performance.md from the results file alone.

A table is between ``<!-- NAME -->`` and ``<!-- end -->``. The prose around it stays as it is. A table whose case was
not measured stays as it is, too.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import median

PAGE = Path("docs/performance.md")
PLOTS = Path("docs/performance")

_NAMES = {
    "recvlogical": "`pg_recvlogical` to /dev/null, `streaming=on`",
    "segments": "**xidstream, slot to handler** (decoded, spilled, released)",
    "spark": "**xidstream, slot to a Spark action on every row**",
    "delta": "**xidstream, slot to committed Delta tables**",
    "subscription": "PostgreSQL's subscription, `streaming=parallel`, `binary`",
    "debezium": "Debezium engine, JSON, events counted",
    "binary": "`pg_recvlogical`, `binary`",
    "off": "`pg_recvlogical`, `streaming=off`, protocol 1",
    "recvlogical_unix": "`pg_recvlogical` on a Unix socket",
    "segments_unix": "xidstream, slot to handler, on a Unix socket (ratio to the line above)",
}


def write() -> None:
    measured = results.load()
    PLOTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results.OUT, results.KEPT)
    tables = {
        "machine": [_machine(measured)],
        "drain": _drain(measured.get("drain")),
        "small": _small(measured.get("drain")),
        "cost": _cost(measured.get("drain")),
        "lag": _lag(measured.get("lag")),
        "delta": _delta(measured.get("delta")),
        "latency": _latency(measured.get("latency")),
        "streams": _growth(measured.get("growth"), "streams", "open streams"),
        "sizes": _growth(measured.get("growth"), "sizes", "rows"),
        "tables": _tables(measured.get("tables")),
        "startup": _startup(measured.get("startup")),
        "walsender": _walsender(measured.get("profile")),
        "threads": _threads(measured.get("profile")),
        "reader": _python(measured.get("profile"), "reader"),
        "buffers": _python(measured.get("profile"), "buffers"),
    }
    text = PAGE.read_text()
    for name, lines in tables.items():
        if lines:
            body = "\n".join(lines)
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m, body=body: m[1] + body + "\n" + m[2], text, flags=re.DOTALL)
    PAGE.write_text(text)
    _plots(measured)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(head)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _machine(measured: dict[str, Any]) -> str:
    """The sentence about the machine. Cases may be of several commits, so each commit is named with its cases."""
    machine = measured["machine"]
    cases: dict[str, list[str]] = {}
    for name, case in sorted(measured.items()):
        if name != "machine":
            cases.setdefault(case["commit"], []).append(name)
    where = "; ".join(f"{', '.join(names)} at commit {commit}" for commit, names in cases.items())
    return (
        f"Measured on {machine['date']}, {where}: {machine['cores']} cores ({machine['processor']}), "
        f"Python {machine['python']}."
    )


def _drain(drain: Any) -> list[str]:
    if not drain:
        return []
    large = drain["large"]
    ratios = large["ratio_to_recvlogical"]
    rows = []
    for name, title in _NAMES.items():
        if name in large["rows_per_s"]:
            shown = f"{ratios[name]:.2f} ×" if name in ratios else ""
            seconds = median(large["seconds"][name])
            rows.append((title, f"{seconds:.1f}", f"{large['rows_per_s'][name]:,.0f}", shown))
    return _table((f"{large['rows']:,} rows, one transaction", "s", "rows/s", "of `pg_recvlogical`"), rows)


def _small(drain: Any) -> list[str]:
    if not drain:
        return []
    rows = []
    for size in (1, 10, 1000):
        case = drain[f"small_{size}"]
        speed, ratios = case["rows_per_s"], case["ratio_to_recvlogical"]
        rows.append(
            (
                f"{case['rows']:,} rows in transactions of {size:,}",
                f"{speed['recvlogical']:,.0f}",
                f"{speed['handler']:,.0f} ({ratios['handler']:.2f} ×)",
                f"{speed['spark']:,.0f} ({ratios['spark']:.2f} ×)",
            )
        )
    return _table(("rows/s", "`pg_recvlogical`", "to the handler", "to a Spark action on every row"), rows)


def _cost(drain: Any) -> list[str]:
    if not drain:
        return []
    large = drain["large"]

    def of(runs: str, part: str, role: str) -> str:
        return f"{median([run[part].get(role, 0.0) for run in large[runs]]):.2f}"

    roles = (("reader", "slot reader"), ("buffers", "xid buffers"), ("sequencer", "commit sequencer"))
    roles += (("spark", "Spark: driver's JVM, executor, its Python"), ("ray", "Ray: raylet, GCS, agents"))
    rows = [
        (
            title,
            of("cost", "cpu_s_per_million_rows", role),
            of("cost_delta", "cpu_s_per_million_rows", role),
            of("cost", "growth_mb", role),
        )
        for role, title in roles
    ]
    head = ("the large transaction", "CPU s per million rows, to a Spark action", "to Delta", "growth, MiB")
    spilled = median([run["spilled_mb"] for run in large["cost"]])
    return [*_table(head, rows), "", f"Spilled: {spilled:,.0f} MiB of segments."]


def _lag(lag: Any) -> list[str]:
    if not lag:
        return []
    rows = []
    for size, case in lag["on"].items():
        off = lag["off"].get(size)
        rows.append(
            (
                f"{int(size):,}",
                *(f"{case[name]['median_s']:.2f}" for name in ("handler", "count", "delta")),
                *(f"{off[name]['median_s']:.2f}" if off else "" for name in ("handler", "count", "delta")),
            )
        )
    head = ("rows", "handler", "Spark count", "Delta", "off: handler", "off: count", "off: Delta")
    return _table(head, rows)


def _delta(delta: Any) -> list[str]:
    if not delta:
        return []
    rows = [
        (
            f"{int(size):,}",
            f"{case['lag_s']['median']:.2f}",
            f"{delta['savepoints'][size]['lag_s']['median']:.2f}",
            f"{case['spark_cpu_s_per_million_rows']['median']:.2f}",
            f"{case['stored_bytes_per_row']['median']:.0f}",
        )
        for size, case in delta["plain"].items()
    ]
    head = (
        "rows",
        "lag, s",
        "with 1,000 savepoints rolled back",
        "Spark, CPU s per million rows",
        "stored, B a row",
    )
    return _table(head, rows)


def _latency(latency: Any) -> list[str]:
    if not latency:
        return []
    rows = [
        (
            f"{rate}",
            f"{case['per_s']:.0f}",
            *(f"{case[p]:.0f}" for p in ("p50_ms", "p90_ms", "p99_ms", "max_ms")),
        )
        for rate, case in latency.items()
        if rate.isdigit()
    ]
    return _table(
        ("asked for, 1/s", "written, 1/s", "p50 ms", "p90 ms", "p99 ms", "max ms"),
        sorted(rows, key=lambda r: int(r[0])),
    )


def _tables(tables: Any) -> list[str]:
    if not tables:
        return []
    n_live, n_dropped = tables["tables"], tables["dropped_tables"]
    titles = {
        "live": f"{n_live:,} tables, two rows in each, one transaction a row",
        "live_again": "the same, from another slot",
        "dropped": f"{n_dropped:,} tables made, filled with one row, and dropped",
    }
    fields = ("reader_growth_mb", "buffer_growth_mb", "reader_cpu_s", "buffers_cpu_s")
    rows = [(title, *(f"{tables[name][field]:.1f}" for field in fields)) for name, title in titles.items()]
    head = ("", "reader grew, MiB", "the buffer grew, MiB", "reader, CPU s", "buffer, CPU s")
    return _table(head, rows)


def _growth(growth: Any, part: str, title: str) -> list[str]:
    if not growth:
        return []
    rows = [
        (
            f"{int(n):,}",
            f"{case['rows_per_s']:,.0f}",
            f"{case['reader_cpu_s_per_million']:.2f}",
            f"{case['buffers_cpu_s_per_million']:.2f}",
            f"{case['reader_growth_mb']:.0f}",
            f"{case['buffer_growth_mb']:.0f}",
        )
        for n, case in sorted(growth[part].items(), key=lambda item: int(item[0]))
    ]
    head = (
        title,
        "rows/s",
        "reader, CPU s per million",
        "buffers, CPU s per million",
        "reader grew, MiB",
        "a buffer grew, MiB",
    )
    return _table(head, rows)


def _startup(startup: Any) -> list[str]:
    if not startup:
        return []
    titles = (
        ("first_row", "`xidstream run` to its first row in the handler"),
        ("kernels_cached", "importing the decoder and loading its kernels, cached on disk"),
        ("kernels_compiled", "the same with an empty cache"),
    )
    rows = [(title, f"{startup[name]['median_s']:.1f}") for name, title in titles]
    parts = ", ".join(f"{part} {s:.1f}" for part, s in startup.get("parts", {}).items())
    return _table(("", "s"), [*rows, *([(f"its longest parts by themselves: {parts}", "")] if parts else [])])


def _walsender(profile: Any) -> list[str]:
    if not profile:
        return []
    names = ("wall_s", "user_s", "system_s", "waited_for_cpu_s", "blocked_s")
    rows = [
        (f"{link}, {reader}", *(f"{spent[name]:.1f}" for name in names))
        for link, by_reader in profile["walsender"].items()
        for reader, spent in by_reader.items()
    ]
    head = ("the walsender, s", "wall clock", "CPU, user", "CPU, system", "waited for a CPU", "blocked")
    return _table(head, rows)


def _threads(profile: Any) -> list[str]:
    if not profile:
        return []
    rows = [
        (
            role,
            f"{sum(by_thread.values()):.2f}",
            ", ".join(f"{name} {s:.2f}" for name, s in _by_size(by_thread)),
        )
        for role, by_thread in profile["threads"].items()
    ]
    return _table(("", "CPU s per million rows", "of these"), rows)


def _python(profile: Any, role: str) -> list[str]:
    if not profile:
        return []
    samples = profile["python"][role]
    total = sum(samples.values())
    rows = [(label, f"{100 * n / total:.0f} %") for label, n in _by_size(samples)]
    return _table((f"{role}: {total:,} samples", ""), rows)


def _by_size(numbers: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((k, n) for k, n in numbers.items() if n), key=lambda item: -item[1])


def _plots(measured: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    def figure(
        name: str, xlabel: str, ylabel: str, series: dict[str, tuple[list[float], list[float]]], log: bool
    ) -> None:
        plot, axes = plt.subplots(figsize=(7, 4), dpi=110)
        for label, (x, y) in series.items():
            axes.plot(x, y, marker="o", label=label)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log")
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        plot.tight_layout()
        plot.savefig(PLOTS / name)
        plt.close(plot)

    if lag := measured.get("lag"):
        series = {}
        for streaming, what in (
            ("on", "handler"),
            ("on", "count"),
            ("on", "delta"),
            ("off", "handler"),
            ("off", "delta"),
        ):
            sizes = sorted(lag[streaming], key=int)
            label = f"streaming={streaming}, to {'the handler' if what == 'handler' else what}"
            series[label] = ([int(s) for s in sizes], [lag[streaming][s][what]["median_s"] for s in sizes])
        figure("lag.png", "rows in the transaction", "seconds after COMMIT", series, True)
    if growth := measured.get("growth"):
        counts = sorted(growth["streams"], key=int)
        series = {
            role: (
                [int(n) for n in counts],
                [growth["streams"][n][f"{role}_cpu_s_per_million"] for n in counts],
            )
            for role in ("reader", "buffers")
        }
        figure("streams.png", "streams open at once", "CPU seconds per million rows", series, False)
