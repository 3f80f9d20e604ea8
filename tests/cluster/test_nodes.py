"""Several nodes without a shared disk: where the parts are, equal results, and nodes that die in mid-transaction."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from moto.server import ThreadedMotoServer
from pyarrow import fs

from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline, wait_until
from xidstream.actors.runtime.java import ensure_java

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
FILL = "insert into big select i, repeat('x', 100) from generate_series({}::bigint, {}::bigint) i"
BUCKET = "xidstream-cluster"


@pytest.fixture
def s3() -> Iterator[str]:
    """``host:port`` of a server of the S3 protocol; credentials and endpoint are in the nodes' environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name in [n for n in os.environ if n.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in {
                "ACCESS_KEY_ID": "testing",
                "SECRET_ACCESS_KEY": "testing",
                "REGION": "us-east-1",
                "EC2_METADATA_DISABLED": "true",
                "ALLOW_HTTP": "true",
                "ENDPOINT_URL": f"http://{host}:{port}",
            }.items():
                patch.setenv(f"AWS_{name}", value)
            fs.S3FileSystem(
                endpoint_override=f"{host}:{port}",
                scheme="http",
                region="us-east-1",
                allow_bucket_creation=True,
            ).create_dir(BUCKET)
            yield f"{host}:{port}"
    finally:
        server.stop()


class Nodes:
    """A head without CPUs, so that the parts are on the others; nodes are found by their Ray id."""

    def __init__(self, stack: ExitStack) -> None:
        from ray.cluster_utils import Cluster

        self._options = {"object_store_memory": 150_000_000, "include_dashboard": False}
        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, **self._options}, shutdown_at_exit=False
        )
        stack.callback(self.cluster.shutdown)
        stack.callback(ray.shutdown)
        self._by_id: dict[str, Any] = {}

    def add(self, cpus: int, **resources: float) -> str:
        node = self.cluster.add_node(num_cpus=cpus, resources=resources, **self._options)
        self._by_id[node.node_id] = node
        return str(node.node_id)

    def connect(self) -> None:
        ray.init(
            address=self.cluster.address, namespace="xidstream", log_to_driver=False, logging_level="ERROR"
        )

    def kill(self, node_id: str) -> None:
        """All at once, as when the machine loses its power."""
        self.cluster.remove_node(self._by_id.pop(node_id), allow_graceful=False)

    def of(self, class_name: str) -> list[str]:
        """The nodes of the living actors of a class."""
        found = ray._private.state.actors().values()  # type: ignore[attr-defined]
        return [
            actor["Address"]["NodeID"]
            for actor in found
            if actor["State"] == "ALIVE" and actor["ActorClassName"].rpartition(".")[2] == class_name
        ]


def end_what_names(folder: str) -> None:
    """Ray's servers of this folder that are left: a node that did not start in time on a busy machine leaves some."""
    for process in psutil.process_iter():
        try:
            if any(folder in argument for argument in process.cmdline()):
                process.kill()
        except psutil.Error:
            continue


@pytest.fixture
def nodes(s3: str, own_token: None) -> Iterator[Nodes]:
    ensure_java()
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="xs-ray-", ignore_cleanup_errors=True)
        )
        stack.callback(end_what_names, folder)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # Elsewhere than where another process's ray.init() looks for a Ray to join.
        patch.setenv("RAY_TMPDIR", folder)
        yield Nodes(stack)


@pytest.fixture
def pipeline(nodes: Nodes, s3: str, database: Database, tmp_path: Path) -> Iterator[RayPipeline]:
    query = f"endpoint_override={s3}&scheme=http&region=us-east-1"
    made = RayPipeline(database, f"s3://{BUCKET}/{database.name}?{query}")
    yield made
    made.stop()


def set_up(database: Database) -> None:
    database.execute("create table big (id bigint primary key, note text)")
    database.execute("create publication p for table big")


def segments(endpoint: str) -> list[str]:
    client = fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
    found = client.get_file_info(fs.FileSelector(BUCKET, recursive=True))
    return [file.path for file in found if file.path.endswith(".parquet")]


@NEWEST
def test_floor_near_the_reader_others_spread_and_a_dead_node_costs_an_epoch_and_no_row(
    nodes: Nodes, s3: str, pipeline: RayPipeline
) -> None:
    database = pipeline.database
    set_up(database)
    for _ in range(3):
        nodes.add(2)
    nodes.connect()
    supervisor = pipeline.start(
        logical_decoding_work_mem="64kB",
        block_bytes=64 << 10,
        buffer_memory_bytes="1MB",
        buffers_max=3,
        buffer_cpus=0.8,
    )
    assert nodes.of("XidBuffer") == nodes.of("SlotReader"), "there is room, and the blocks are there"
    sessions = [database.connect() for _ in range(4)]

    def fill(part: int) -> None:
        for n, session in enumerate(sessions):
            first = n * 100_000 + part * 10_000
            session.execute(FILL.format(first + 1, first + 10_000).encode())

    def moved() -> bool:
        reader = supervisor.status().account.reader
        return reader is not None and reader.n_buffers == 3 and reader.n_moved >= 2

    try:
        for session in sessions:
            session.execute(b"begin")
        fill(0)
        wait_until(moved)
        (reader_node,) = nodes.of("SlotReader")
        others = set(nodes.of("XidBuffer")) - {reader_node}
        assert others, "three buffers of 0.8 CPUs do not fit beside the reader"
        wait_until(lambda: pipeline.open_rows() > 4 * 9000)

        # A node with a buffer: hard, in the middle of all four.
        epoch = supervisor.status().run.epoch
        nodes.kill(others.pop())
        wait_until(lambda: supervisor.status().run.epoch != epoch and pipeline.open_rows() > 4 * 9000, 180)
        fill(1)
        wait_until(lambda: pipeline.open_rows() > 4 * 18_000)
        sessions[3].execute(b"commit")
        wait_until(lambda: len(pipeline.driver.transactions) == 1)

        # The reader's own node.
        epoch = supervisor.status().run.epoch
        nodes.add(2)
        nodes.kill(nodes.of("SlotReader")[0])
        wait_until(lambda: supervisor.status().run.epoch != epoch and pipeline.open_rows() > 3 * 18_000, 180)
        for session in reversed(sessions[:3]):
            session.execute(b"commit")
    finally:
        for session in sessions:
            session.close()
    wait_until(lambda: len({t["xid"] for t in pipeline.driver.transactions}) == 4, 180)
    # The driver of this test has no watermark: what it took and could not report comes again, whole.
    expected = {n: [n * 100_000 + i for i in range(1, 20_001)] for n in range(4)}
    by_commit: dict[int, list[int]] = {}
    for row in pipeline.driver.rows("public.big"):
        by_commit.setdefault(row["_commit_lsn"], []).append(row["id"])
    assert [by_commit[lsn] for lsn in sorted(by_commit)] == [expected[n] for n in (3, 2, 1, 0)]
    wait_until(lambda: not segments(s3))


@NEWEST
def test_the_whole_path_over_nodes_goes_on_when_the_node_of_reader_and_session_dies(
    nodes: Nodes, s3: str, database: Database, tmp_path: Path
) -> None:
    from deltalake import DeltaTable

    set_up(database)
    for _ in range(2):
        nodes.add(1)
    nodes.add(2, executors=2)
    nodes.connect()
    (tmp_path / "run.toml").write_text(
        f'dsn = "{database.dsn()}"\nslot = "s_{database.name}"\npublication = "p"\ncreate_slot = true\n'
        f'storage = "s3://{BUCKET}/segments?endpoint_override={s3}&scheme=http&region=us-east-1"\n'
        f'sink = "delta:s3://{BUCKET}/delta"\nlogical_decoding_work_mem = "64kB"\n'
        'buffer_memory_bytes = "1MB"\nblock_bytes = "64kB"\nbuffers_max = 2\n'
        '[spark_conf]\n"spark.ray.raydp_spark_executor.actor.resource.executors" = "1"\n'
    )
    log = (tmp_path / "run.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "actors", "run", "--config", str(tmp_path / "run.toml")],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "RAY_ADDRESS": nodes.cluster.address},
    )

    def happens(condition: Callable[[], Any], timeout_s: float = 240) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline_s, Path(log.name).read_text()
            time.sleep(0.3)

    def committed() -> list[dict[str, Any]]:
        try:
            table = DeltaTable(f"s3://{BUCKET}/delta/_transactions").to_pyarrow_table()
        except Exception:  # not there yet
            return []
        return sorted(table.to_pylist(), key=lambda t: t["commit_lsn"])

    def streamed() -> int:
        query = "select stream_bytes from pg_stat_replication_slots where slot_name = %s"
        found = database.execute(query, f"s_{database.name}")
        return int(found[0][0]) if found else 0

    try:
        happens(lambda: len(nodes.of("SparkDriver")) == 1 and nodes.of("SlotReader"))
        happens(lambda: database.execute("select 1 from pg_replication_slots where active"))
        database.execute(FILL.format(1, 1000))
        happens(lambda: len(committed()) == 1)
        with database.connect() as session:
            session.execute(b"begin")
            session.execute(FILL.format(10_001, 60_000).encode())
            happens(lambda: streamed() > 5_000_000)
            # Whatever else is there goes with them: buffers, executors, RayDP's master.
            doomed = {*nodes.of("SlotReader"), *nodes.of("SparkDriver")}
            for node in doomed:
                nodes.kill(node)
            for _ in doomed:
                nodes.add(2, executors=2)
            session.execute(FILL.format(60_001, 90_000).encode())
            session.execute(b"commit")
        database.execute("insert into big values (100001, 'after')")
        happens(lambda: len(committed()) == 3)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
        print(Path(log.name).read_text())
    assert process.returncode == 0
    rows = DeltaTable(f"s3://{BUCKET}/delta/public.big").to_pyarrow_table().to_pylist()
    ids = [r["id"] for r in sorted(rows, key=lambda r: (r["_commit_lsn"], r["_seq"]))]
    assert ids == [*range(1, 1001), *range(10_001, 90_001), 100_001]
    assert [t["rows"] for t in committed()] == [1000, 80_000, 1]
