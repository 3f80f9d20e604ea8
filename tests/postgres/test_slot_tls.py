"""Reading under TLS (fact 31). The wheel's server has none, so a proxy of the test's own speaks it.

The proxy packs the server's bytes into TLS records of the largest size, 16 kB. Where libpq has less room than
that, decrypted bytes stay inside OpenSSL while the socket has nothing, and a reader that trusts poll() alone
stalls. libpq 18.6, which is in the psycopg-binary wheel, takes them in by itself; an older one shows the stall:
run with PSYCOPG_IMPL=python where the system's libpq is 15, say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_fixtures import Database
from tests.proxies import CutAfter, TlsProxy, make_certificate
from tests.snapshot_ranges import relation_of, snapshot_of
from xidstream.pipeline.errors import ConnectionLost, LoginRefused
from xidstream.pipeline.initial_copy.range_reading import RangeReader
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.postgres.admin import create_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import stream_options
from xidstream.pipeline.snapshot.tables import plan_ranges

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def proxy(database: Database, certificate: Path) -> Iterator[TlsProxy]:
    server = database.server
    proxy = TlsProxy(server.socket_dir / f".s.PGSQL.{server.port}", certificate)
    yield proxy
    proxy.close()


def collect(connection: ReplicationConnection) -> None:
    """Read one whole transaction of five rows."""
    inserts = 0
    while True:
        data = connection.get_copy_data()
        if data is None:
            # A server that has nothing to say sends a keepalive after 30 s, which would end a stall.
            assert connection.wait_readable(20), "stalled with data on its way"
        elif data[0] == ord("w"):
            inserts += data[25] == ord("I")
            if data[25] == ord("C"):
                break
    assert inserts == 5


def test_every_change_arrives_under_tls_without_waiting_for_the_next(
    database: Database, proxy: TlsProxy, certificate: Path
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL"
    )
    database.execute("CREATE PUBLICATION pub FOR TABLE t")
    dsn = database.dsn(host="localhost", port=proxy.port, sslmode="verify-full", sslrootcert=str(certificate))
    made = SlotSettings(dsn, f"tls_{database.name}", ("pub",))
    create_slot(made.dsn, made.slot)
    with ReplicationConnection(made) as connection:
        assert connection.pgconn.ssl_in_use
        connection.start_replication(made.slot, INVALID_LSN, stream_options(made, connection.server_version))
        # About 30 to 33 kB each, two records; after the first, libpq holds the beginning of a message, and has
        # no room for the whole of the second.
        for n in range(200):
            rows = "INSERT INTO t SELECT %s * 5 + i, repeat('x', %s) FROM generate_series(0, 4) i"
            database.execute(rows, n, 6000 + 3 * n)
            collect(connection)


def test_a_snapshots_rows_arrive_under_tls(
    database: Database, proxy: TlsProxy, certificate: Path, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int, v text)")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("INSERT INTO t SELECT i, repeat('x', 3 * i) FROM generate_series(1, 4000) i")
    dsn = database.dsn(host="localhost", port=proxy.port, sslmode="verify-full", sslrootcert=str(certificate))
    reader = RangeReader(dsn)
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        for pages in plan_ranges(snapshot.source.leaves, by_range=True, range_bytes=4 << 20):
            snapshot.read(snapshot.task(pages), reader)
    reader.close()
    assert len(snapshot.files) > 3
    rows = snapshot.rows().select(["id", "v"]).to_pylist()
    assert sorted((row["id"], len(row["v"])) for row in rows) == [(i, 3 * i) for i in range(1, 4001)]


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "ended"])
def test_a_cut_anywhere_between_the_request_and_the_first_query_is_a_lost_connection(
    database: Database, proxy: TlsProxy, certificate: Path, resets: bool
) -> None:
    """Within the handshake, the login, and the settings of the session."""
    settings = f"sslmode=verify-full sslrootcert={certificate} gssencmode=disable"
    n_bytes, n_cut, is_whole = 1, 0, False
    while not is_whole:
        link = CutAfter(proxy.port, n_bytes, resets=resets)
        dsn = f"{database.dsn(host='localhost', port=link.port)} {settings}"
        try:
            ReplicationConnection(SlotSettings(dsn, "s", ("p",))).close()
            is_whole = True
        except ConnectionLost:
            n_cut += 1
        finally:
            link.close()
        n_bytes = n_bytes * 3 // 2 + 1
    assert n_cut > 10


def test_certificate_of_somebody_else_is_refused(
    database: Database, proxy: TlsProxy, certificate: Path
) -> None:
    dsn = database.dsn(host="127.0.0.1", port=proxy.port, sslmode="verify-full", sslrootcert=str(certificate))
    with pytest.raises(LoginRefused, match="TLS cannot be agreed on"):
        ReplicationConnection(SlotSettings(dsn, "s", ("p",)))
