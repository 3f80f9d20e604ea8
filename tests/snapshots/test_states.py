"""The fold of large logs (``states``) against the plain one (``tests.fold``), on logs that chance makes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fold import Row, folded
from tests.snapshots.states import State, states, transactions_of

COLUMNS = ["id", "v", "big"]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("v", pa.string()),
        ("big", pa.string()),
        ("_change_type", pa.string()),
        ("_commit_lsn", pa.int64()),
        ("_seq", pa.int64()),
        ("_xid", pa.int64()),
        ("_unchanged", pa.list_(pa.string())),
        ("_text", pa.map_(pa.string(), pa.string())),
    ]
)
PLACE = 50


class Maker:
    """Changes that a table can have, in its order, and the rows that it then has."""

    def __init__(self, seed: int, *, keyed: bool) -> None:
        self.dice = random.Random(seed)
        self.keyed = keyed
        self.rows: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.lsn = 0
        self.seq = 0

    def add(self, kind: str, row: dict[str, Any] | None, unchanged: list[str] | None = None) -> None:
        sent = dict.fromkeys(COLUMNS) if row is None else dict(row)
        if self.keyed and kind in ("delete", "update_preimage"):
            sent |= {"v": None, "big": None}
        sent |= dict.fromkeys(unchanged or ())
        about = {"_change_type": kind, "_commit_lsn": self.lsn, "_seq": self.seq, "_xid": self.lsn}
        self.log.append({**sent, **about, "_unchanged": unchanged, "_text": None})
        self.seq += 1

    def transaction(self, lsn: int) -> None:
        self.lsn, self.seq = lsn, 0
        for _ in range(self.dice.randint(1, 6)):
            self.change()

    def change(self) -> None:
        dice = self.dice
        what = dice.random()
        if what < 0.35 or not self.rows:
            new_id = dice.randrange(40)
            row = {"id": new_id, "v": dice.choice(["a", "b", None]), "big": f"big {dice.random()}"}
            if not self.keyed or self.is_free(new_id):
                self.rows.append(row)
                self.add("insert", row)
        elif what < 0.5:
            self.add("delete", self.rows.pop(dice.randrange(len(self.rows))))
        elif what < 0.97:
            self.update(self.rows[dice.randrange(len(self.rows))])
        else:
            self.rows.clear()
            self.add("truncate", None)

    def update(self, row: dict[str, Any]) -> None:
        old, new_id = dict(row), self.dice.randrange(40)
        moves = self.dice.random() < 0.4 and (not self.keyed or self.is_free(new_id))
        if moves:
            row["id"] = new_id
        row["v"] = f"v {self.dice.randrange(1000)}"
        keeps = self.dice.random() < 0.6
        if not keeps:
            row["big"] = f"other {self.dice.random()}"
        if moves or not self.keyed:
            self.add("update_preimage", old)
        self.add("update_postimage", row, ["big"] if keeps and self.keyed else None)

    def is_free(self, key: int) -> bool:
        return all(row["id"] != key for row in self.rows)


def told(rows: Counter[Row]) -> State:
    total = 0
    for row, n in rows.items():
        text = "".join(("\\N" if value is None else str(value)) + chr(31) for value in row)
        total += n * int.from_bytes(hashlib.md5(text.encode()).digest()[8:15], "little")
    return rows.total(), total


def write(folder: Path, log: Iterable[dict[str, Any]]) -> list[str]:
    rows = list(log)
    files = [folder / "a.parquet", folder / "b.parquet"]
    for file, part in zip(files, (rows[::2], rows[1::2]), strict=True):
        pq.write_table(pa.Table.from_pylist(part, SCHEMA), file)
    return [str(file) for file in files]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_states_at_every_lsn_are_those_of_the_plain_fold(tmp_path: Path, seed: int, keyed: bool) -> None:
    maker, key = Maker(seed, keyed=keyed), ["id"] if keyed else None
    for lsn in range(1, 120):
        maker.transaction(lsn)
        if lsn == PLACE - 1:
            before = [dict(row) for row in maker.rows]
    twin = states(write(tmp_path, maker.log), COLUMNS, key)
    assert twin.oddities == ()
    for lsn in range(125):
        changes = [row for row in maker.log if row["_commit_lsn"] <= lsn]
        assert twin.at(lsn) == told(folded(COLUMNS, key, [], changes)), lsn

    # The same from a snapshot on, and from another one that does not count.
    (tmp_path / "snapshot").mkdir()
    maker.lsn, log = PLACE - 1, maker.log
    maker.log, maker.seq = [], 1 << 32
    maker.keyed = False
    for row in before:
        maker.add("snapshot", row)
    maker.lsn = 17
    maker.add("snapshot", {"id": 1, "v": "of another generation", "big": ""})
    for row in maker.log:
        row["_xid"] = None
    files = write(tmp_path / "snapshot", [*log, *maker.log])
    contained = [(xid, lsn) for xid, lsn in transactions_of(files) if lsn < PLACE]
    joined = states(files, COLUMNS, key, place=PLACE - 1, contained=contained)
    assert joined.oddities == ()
    assert [joined.at(lsn) for lsn in range(PLACE - 1, 125)] == [
        twin.at(lsn) for lsn in range(PLACE - 1, 125)
    ]


def test_what_no_fold_can_make_sense_of_is_told(tmp_path: Path) -> None:
    maker = Maker(1, keyed=True)
    maker.lsn = 1
    row = {"id": 1, "v": "a", "big": "b"}
    maker.add("insert", row)
    maker.add("insert", row)
    maker.add("delete", {"id": 2, "v": None, "big": None})
    maker.add("update_postimage", {"id": 3, "v": "c", "big": None}, ["big"])
    found = states(write(tmp_path, maker.log), COLUMNS, ["id"])
    assert sorted(found.oddities) == [
        "1 unchanged values of big have no earlier row",
        "1 × delete of a key that is not there",
        "1 × insert of a key that is there",
        "1 × update_postimage of a key that is not there",
    ]
