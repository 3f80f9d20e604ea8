"""A root that has the log of the same slot on another server, as after ``pg_upgrade``: nothing is written to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lakes import DeltaLake, IcebergLake
from xidstream.pipeline.errors import ExitStatus, SinkDiverged
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.sink import make_sink, sink_type
from xidstream.pipeline.sinks.sink_findings import ServerSide

OLD = SlotIdentity(7, "shop", "orders")
TENURE = Tenure(1, "epoch", 1, {}, Lsn(10**9))


@pytest.fixture(params=["delta", "iceberg"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    make: Callable[[Path], DeltaLake | IcebergLake] = DeltaLake if request.param == "delta" else IcebergLake
    made = make(tmp_path / "lake").sink
    claim(made, OLD)
    return made


def claim(spec: str, identity: SlotIdentity) -> None:
    sink = make_sink(spec, identity)
    try:
        sink.open(lambda: pytest.fail("no session is needed"))
        sink.claim(TENURE)
    finally:
        sink.close()


def checked(spec: str, identity: SlotIdentity) -> list[Finding]:
    server = ServerSide(identity, lambda: TENURE, [("public", "a")])
    return [each for each in sink_type(spec).check("")(server) if each.status is Status.FAILED]


def test_the_same_slot_on_another_server_is_refused_with_what_to_do_and_leaves_no_mark(spec: str) -> None:
    new = SlotIdentity(8, "shop", "orders")
    for _ in range(2):  # the first attempt has not made the root its own
        with pytest.raises(
            SinkDiverged, match=r"slot orders of database shop on another server \(system identifier 7"
        ) as refused:
            claim(spec, new)
        assert refused.value.policy.exit_status is ExitStatus.TERMINAL
        for part in (
            "pg_upgrade",
            "another, empty --sink and another --storage",
            "`--snapshot initial`",
            "are in no log",
        ):
            assert part in refused.value.message + refused.value.remedy
    (found,) = checked(spec, new)
    assert "system identifier 7" in found.text
    claim(spec, OLD)
    assert checked(spec, OLD) == []


@pytest.mark.parametrize(
    "other",
    [SlotIdentity(8, "shop", "parts"), SlotIdentity(8, "stock", "orders"), SlotIdentity(7, "shop", "parts")],
)
def test_another_slot_or_database_may_write_to_the_same_root(spec: str, other: SlotIdentity) -> None:
    claim(spec, other)
    claim(spec, other)
    assert checked(spec, other) == []
