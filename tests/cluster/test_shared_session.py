"""The one Spark session of several slots is lost: each of them goes on with the next one."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_command_line import ROWS, XIDSTREAM, ask_for_spark, delta, environment, wait_until
from tests.postgres_fixtures import Database
from tests.processes import spark_driver_jvms

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)


@NEWEST
def test_a_lost_jvm_is_replaced_once_for_all_slots(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    names = [f"s_{database.name}_{n}" for n in ("a", "b")]
    (tmp_path / "slots.toml").write_text(
        f'storage = "{tmp_path}/segments"\ncreate_slot = true\ndsn = "{database.dsn()}"\npublication = "p"\n'
        'logical_decoding_work_mem = "64kB"\nbuffer_memory_bytes = "1MB"\n'
        + "".join(f'[[slots]]\nslot = "{n}"\nsink = "delta:{tmp_path}/{n}/delta"\n' for n in names)
    )
    process = subprocess.Popen(
        [*XIDSTREAM, "run", "--config", str(tmp_path / "slots.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
    )

    def n_committed(slot: str) -> int:
        return len(delta(tmp_path / slot, "_transactions"))

    try:
        active = "select count(*) from pg_replication_slots where active"
        wait_until(lambda: database.execute(active) == [(2,)], 180)
        database.execute(ROWS.format(1, 1000))
        ask_for_spark(database.execute, 1_000_000)
        wait_until(lambda: all(n_committed(slot) == 3 for slot in names), 180)
        (jvm,) = spark_driver_jvms(process.pid)
        jvm.kill()
        database.execute(ROWS.format(1001, 2000))
        wait_until(lambda: all(n_committed(slot) == 4 for slot in names), 240)
        assert spark_driver_jvms(process.pid) == [], "what is small needs none"
        database.execute("alter table t alter extra type bigint using extra::bigint")
        database.execute("insert into t select i, 'x', i from generate_series(2000000, 2200000) i")
        wait_until(lambda: all(n_committed(slot) == 5 for slot in names), 120)
        (next_jvm,) = spark_driver_jvms(process.pid)
        assert next_jvm.pid != jvm.pid
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        print(output)
    assert process.returncode == 0, output
    assert output.count("starting again") == len(names), "once for each slot"
    assert "Unhandled error" not in output and "Traceback" not in output
    for slot in names:
        assert f"{slot}: " in output
        assert [r["id"] for r in delta(tmp_path / slot, "public.t")] == list(range(1, 3001))
