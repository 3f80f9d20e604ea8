"""Whether a table's files are its rows: the protocol's features, and a deletion vector that another tool wrote."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.table import ProtocolVersions

from tests.unit.mirror.bases import TABLE, PlainMirror
from xidstream.pipeline.changelog.delta_bases import current
from xidstream.pipeline.changelog.log_table import DeltaLogTable
from xidstream.pipeline.delta.plain_files import check_plain_files, has_plain_files
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.log_tables.locations import Location

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
FEATURES = {"minReaderVersion": 3, "minWriterVersion": 7}


def inline_vector(row: int) -> dict[str, Any]:
    """A deletion vector of one row, inside the log (Delta's protocol, "Deletion Vectors")."""
    bitmap = struct.pack("<IIHHIH", 12346, 1, 0, 0, 16, row)
    content = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    content += b"\0" * (-len(content) % 4)
    words = [word for (word,) in struct.iter_unpack(">I", content)]
    text = "".join(Z85[word // 85**k % 85] for word in words for k in (4, 3, 2, 1, 0))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(content), "cardinality": 1}


def commit(path: Path, *actions: dict[str, Any]) -> None:
    version = DeltaTable(str(path)).version() + 1
    lines = "".join(f"{json.dumps(action)}\n" for action in actions)
    (path / "_delta_log" / f"{version:020d}.json").write_text(lines)


def first_add(path: Path) -> dict[str, Any]:
    commits = sorted((path / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for each in commits for line in each.read_text().splitlines()]
    found: dict[str, Any] = next(line["add"] for line in lines if "add" in line)
    return found


def delete_by_vector(path: Path, row: int) -> None:
    """What Spark's DELETE does where the table has ``delta.enableDeletionVectors``."""
    features = ["deletionVectors"]
    add = first_add(path)
    gone = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True, "size": add["size"]}
    commit(
        path,
        {"protocol": {**FEATURES, "readerFeatures": features, "writerFeatures": features}},
        {"remove": gone},
        {"add": {**add, "deletionVector": inline_vector(row), "dataChange": True}},
    )


def test_a_table_with_features_that_change_what_files_say_is_left_alone_by_a_merge() -> None:
    assert has_plain_files(ProtocolVersions(1, 2, None, None))
    assert has_plain_files(ProtocolVersions(3, 7, ["timestampNtz"], ["timestampNtz"]))
    assert not has_plain_files(ProtocolVersions(2, 5, None, None))
    assert not has_plain_files(
        ProtocolVersions(3, 7, ["deletionVectors"], ["timestampNtz", "deletionVectors"])
    )


def test_rows_that_another_tool_deleted_by_a_vector_do_not_come_back(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"_commit_lsn": [1, 2, 3]}))
    delete_by_vector(tmp_path, row=1)
    assert DeltaTable(str(tmp_path)).deletion_vectors().read_all().num_rows == 1, "deltalake sees it"
    with pytest.raises(Unsupported, match=r"another tool has deleted rows of Delta table .*: 1 of its files"):
        DeltaLogTable(Location.parse(str(tmp_path))).files()


def test_a_table_that_may_have_vectors_and_has_none_is_read(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"_commit_lsn": [1, 2, 3]}))
    features = ["deletionVectors"]
    commit(tmp_path, {"protocol": {**FEATURES, "readerFeatures": features, "writerFeatures": features}})
    assert len(DeltaLogTable(Location.parse(str(tmp_path))).files()) == 1


def test_a_table_whose_columns_were_renamed_by_a_mapping_is_refused(tmp_path: Path) -> None:
    mapping = {"delta.columnMapping.mode": "name"}
    write_deltalake(str(tmp_path), pa.table({"_commit_lsn": [1]}))
    lines = (tmp_path / "_delta_log" / f"{0:020d}.json").read_text().splitlines()
    metadata = next(json.loads(line) for line in lines if line.startswith('{"metaData"'))
    schema = json.loads(metadata["metaData"]["schemaString"])
    for i, field in enumerate(schema["fields"], 1):
        names = {"delta.columnMapping.id": i, "delta.columnMapping.physicalName": field["name"]}
        field["metadata"] = names
    metadata["metaData"] |= {"configuration": mapping, "schemaString": json.dumps(schema)}
    commit(tmp_path, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, metadata)
    with pytest.raises(Unsupported, match="its column mapping is by name"):
        check_plain_files(DeltaTable(str(tmp_path)), "public.a")


def test_a_base_table_with_a_deletion_vector_is_not_refreshed_from_its_files(tmp_path: Path) -> None:
    root = Location.parse(str(tmp_path))
    mirror = PlainMirror(root)
    mirror.refresh(10)
    delete_by_vector(Path(current(root).child(TABLE).uri), row=0)
    with pytest.raises(Unsupported, match="deletion vectors"):
        mirror.refresh(20)
