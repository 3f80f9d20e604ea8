"""Storage: the same on a disk and over the S3 protocol, and what happens when it fails."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.s3_server import S3Server
from tests.unit.storage.conftest import files_below
from xidstream.pipeline.errors import ConfigError, StorageFault, UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage import storage as storages
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import MAPPED_FROM_BYTES, Storage, redacted, self_contained


class FullDiskError(OSError):
    def __init__(self) -> None:
        super().__init__(28, "No space left on device")


def test_what_was_written_is_read_listed_and_deleted(storage: Storage) -> None:
    storage.write_bytes("1/s/prepared/a.json", b"one")
    storage.write_bytes("1/s/prepared/a.json", b"two")
    storage.write_bytes("1/s/progress.json", b"")
    assert storage.read_bytes("1/s/prepared/a.json") == b"two"
    assert storage.read_bytes("1/s/progress.json") == b""
    assert storage.exists("1/s/progress.json")
    assert not storage.exists("1/s/prepared")
    assert storage.list_keys("1/s") == ["1/s/prepared/a.json", "1/s/progress.json"]
    assert storage.list_keys("1/s/prepared") == ["1/s/prepared/a.json"]
    assert storage.list_folders("1/s") == ["1/s/prepared"]
    storage.delete(["1/s/prepared/a.json", "1/s/prepared/a.json", "1/s/never.json", "no/such/folder/x"])
    assert storage.list_keys("1/s") == ["1/s/progress.json"]
    storage.delete_folder("1")
    storage.delete_folder("1")
    assert storage.list_keys("1") == []


def test_a_missing_object_is_a_fault_that_names_it(storage: Storage) -> None:
    assert storage.read_buffer("1/s/none") is None
    assert not storage.exists("1/s/none")
    assert storage.list_keys("1/none") == []
    assert storage.list_folders("1/none") == []
    with pytest.raises(StorageFault, match="1/s/none"):
        storage.read_bytes("1/s/none")


def test_a_transactions_folder_goes_with_its_last_segment(storage: Storage, layout: Layout) -> None:
    keys = [layout.segment_key(Xid(7), Lsn(1), n) for n in range(3)]
    for key in keys:
        storage.write_bytes(key, b"x")
    epoch = f"{layout.epochs_prefix}/{layout.epoch}"
    storage.delete(keys[:1])
    assert storage.list_keys(epoch) == keys[1:]
    storage.delete(keys[1:])
    assert storage.list_folders(epoch) == []


def test_the_folder_of_prepared_transactions_loses_only_what_is_named(
    storage: Storage, layout: Layout
) -> None:
    first, second = layout.prepared_key(Xid(1), Lsn(1)), layout.prepared_key(Xid(2), Lsn(2))
    storage.write_bytes(first, b"x")
    storage.write_bytes(second, b"y")
    storage.delete([first])
    assert storage.list_keys(layout.prepared_prefix) == [second]


def test_a_created_object_appears_when_its_block_ends(storage: Storage) -> None:
    with storage.create("1/a") as write:
        write(b"abc")
        assert not storage.exists("1/a")
        assert storage.list_keys("1") == []
        write(memoryview(b"def"))
    assert storage.read_bytes("1/a") == b"abcdef"


def test_an_object_whose_block_fails_never_appears(storage: Storage) -> None:
    with pytest.raises(StorageFault, match=r"1/a.*No space left"), storage.create("1/a") as write:
        write(b"abc")
        raise FullDiskError
    assert storage.list_keys("1") == []


def test_a_write_that_fails_leaves_no_temporary_file_and_the_old_object(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.write_bytes("1/progress.json", b"old")

    def full(_descriptor: int) -> None:
        raise FullDiskError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageFault, match=r"1/progress\.json"):
            local.write_bytes("1/progress.json", b"new")
    assert local.read_bytes("1/progress.json") == b"old"
    assert files_below(tmp_path / "local") == {"1/progress.json"}


def test_a_root_below_a_file_is_a_fault_for_every_operation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    storage = Storage(str(tmp_path / "file" / "root"))
    with pytest.raises(StorageFault, match="1/a"):
        storage.write_bytes("1/a", b"x")
    with pytest.raises(StorageFault, match="1/a"), storage.create("1/a"):
        pass
    with pytest.raises(StorageFault, match="1/a"):
        storage.read_bytes("1/a")
    with pytest.raises(StorageFault, match="1/a"):
        storage.sync(["1/a"])
    storage.delete(["1/a"])  # what is not there need not be deleted


def test_a_bucket_that_does_not_exist_is_a_fault(s3_endpoint: str) -> None:
    storage = Storage(f"s3://no-such-bucket/x?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1")
    with pytest.raises(StorageFault, match="1/a"):
        storage.write_bytes("1/a", b"x")
    with pytest.raises(StorageFault, match="1/a"), storage.create("1/a") as write:
        write(b"x")


def test_a_flush_reaches_the_object_and_every_folder_up_to_the_root(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = set()
    original = os.fsync

    def spy(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    with local.create("1/s/a") as write:
        write(b"x")
    assert flushed == set()
    local.sync(["1/s/a"])
    assert flushed == {str(tmp_path / p) for p in ("", "local", "local/1", "local/1/s", "local/1/s/a")}


def test_the_first_flush_reaches_every_folder_that_was_made_above_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's own entry was flushed, and a crash of the machine took the folder above it away."""
    flushed = set()
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.add(os.readlink(f"/proc/self/fd/{fd}")))
    storage = Storage(str(tmp_path / "new" / "newer" / "root"))
    storage.write_bytes("1/a", b"x")
    above = {str(tmp_path / p) for p in ("", "new", "new/newer")}
    assert above <= flushed and str(tmp_path.parent) not in flushed
    flushed.clear()
    storage.write_bytes("1/a", b"y")
    assert above & flushed == {str(tmp_path / "new" / "newer")}


def test_what_a_killed_writer_left_is_removed_and_a_late_one_leaves_no_object(
    local: Storage, tmp_path: Path
) -> None:
    local.write_bytes("1/a", b"whole")
    local.write_bytes("1/below/b", b"whole")
    (tmp_path / "local" / "1" / ".c.0123456789abcdef.tmp").write_bytes(b"half")
    with pytest.raises(StorageFault, match="1/late"), local.create("1/late") as write:
        write(b"half")
        unfinished = local.list_unfinished("1")
        assert len(unfinished) == 2
        local.delete(unfinished)
    assert files_below(tmp_path / "local") == {"1/a", "1/below/b"}
    assert local.list_unfinished("1") == local.list_unfinished("none") == []


def test_the_end_of_an_object_is_read_with_its_size(storage: Storage) -> None:
    storage.write_bytes("1/a", b"0123456789")
    for n_bytes, tail in ((0, b""), (3, b"789"), (10, b"0123456789"), (99, b"0123456789")):
        found, size = storage.read_tail("1/a", n_bytes)
        assert (bytes(found), size) == (tail, 10)
    assert storage.read_tail("1/none", 3) is None
    storage.write_bytes("1/empty", b"")
    assert storage.read_tail("1/empty", 3) == (pa.py_buffer(b""), 0)


def test_syncing_what_is_missing_is_a_fault(local: Storage) -> None:
    with pytest.raises(StorageFault, match="1/none"):
        local.sync(["1/none"])


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/"])
def test_a_key_that_leaves_the_root_is_refused(storage: Storage, key: str) -> None:
    for operation in (storage.read_bytes, storage.exists, storage.list_keys, storage.delete_folder):
        with pytest.raises(UsageError):
            operation(key)
    with pytest.raises(UsageError):
        storage.write_bytes(key, b"x")


def test_it_pickles_also_after_it_was_used(storage: Storage) -> None:
    storage.write_bytes("1/a", b"x")
    assert pickle.loads(pickle.dumps(storage)).read_bytes("1/a") == b"x"


def test_a_relative_path_stays_where_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage("here")
    monkeypatch.chdir("/")
    storage.write_bytes("1/a", b"x")
    assert (tmp_path / "here/1/a").read_bytes() == b"x"


def test_a_file_uri_is_percent_decoded_and_a_path_is_not(tmp_path: Path) -> None:
    Storage(f"file://{tmp_path}/a%20b").write_bytes("1/x", b"u")
    Storage(f"{tmp_path}/a%20b").write_bytes("1/x", b"p")
    assert (tmp_path / "a b/1/x").read_bytes() == b"u"
    assert (tmp_path / "a%20b/1/x").read_bytes() == b"p"


def test_the_endpoint_of_the_environment_travels_with_the_uri() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_DEFAULT_REGION": "eu-west-1"}
    assert (
        self_contained("s3://b/x", environ)
        == "s3://b/x?endpoint_override=127.0.0.1%3A9000&scheme=http&region=eu-west-1"
    )
    own = "s3://b/x?endpoint_override=other&region=r"
    assert self_contained(own, environ) == own
    assert self_contained("s3://b/x", {}) == "s3://b/x"
    specific = {"AWS_ENDPOINT_URL_S3": "https://s3.test", **environ}
    assert "endpoint_override=s3.test&scheme=https" in self_contained("s3://b/x", specific)


def test_the_endpoint_of_the_environment_is_where_the_requests_go(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    storage = Storage(f"s3://{s3_server.bucket}/by-environment")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    travelled = pickle.loads(pickle.dumps(storage))
    travelled.write_bytes("1/a", b"x")
    assert travelled.read_bytes("1/a") == b"x"


@pytest.mark.parametrize("uri", ["", "http://host/x", "ftp://h/x", "hdfs://h/x"])
def test_a_scheme_that_we_do_not_store_to_is_a_setting_error(uri: str) -> None:
    with pytest.raises(ConfigError):
        Storage(uri)


@pytest.mark.parametrize(
    "uri", ["s3://AKIAKEY:hunter2 space@bucket/x", "s3://AKIAKEY:hunter2@/", "file://host/x"]
)
def test_a_uri_that_cannot_be_read_is_a_setting_error_without_its_secret(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Storage(uri).exists("1/a")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.__cause__)
    assert caught.value.__suppress_context__


def test_a_secret_in_the_uri_is_never_shown() -> None:
    uri = "s3://AKIAKEY:hun/ter2@bucket/x?secret_key=hunter3"
    assert redacted(uri) == "s3://bucket/x"
    assert repr(Storage(uri)) == "Storage('s3://bucket/x')"
    assert redacted("/plain/path@x") == "/plain/path@x"
    assert redacted("file:///a/b") == "file:///a/b"


def test_a_file_that_is_cut_while_it_is_read_ends_no_process(tmp_path: Path) -> None:
    """As a bad sector does: what is mapped and cannot be read is SIGBUS, which nobody catches."""
    program = """
import os, sys
from xidstream.pipeline.storage.storage import Storage
storage = Storage(sys.argv[1])
storage.write_bytes("x", bytes(1 << 20))
whole, (tail, _) = storage.read_buffer("x"), storage.read_tail("x", 1 << 19)
os.truncate(storage.local_path("x"), 0)
assert whole.to_pybytes() == bytes(1 << 20) and tail.to_pybytes() == bytes(1 << 19)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr)


def test_an_enormous_file_is_mapped(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write_bytes("x", b"")
    os.truncate(tmp_path / "x", MAPPED_FROM_BYTES + 10)
    before = pa.total_allocated_bytes()
    data = storage.read_buffer("x", 5)
    assert data is not None and data.size == MAPPED_FROM_BYTES + 5
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert storage.read_tail("x", 7) == (pa.py_buffer(bytes(7)), MAPPED_FROM_BYTES + 10)


def test_an_object_in_parts_appears_when_it_is_closed_and_is_for_stores_alone(
    s3_server: S3Server, local: Storage
) -> None:
    storage = Storage(s3_server.uri("in-parts"))
    output = storage.stored_output("a/b")
    output.write(b"one ")
    assert not storage.exists("a/b")
    output.write(b"two")
    output.close()
    with storage.reading("a/b") as file:
        file.seek(4)
        assert file.read() == b"two"
    with pytest.raises(StorageFault, match="cannot read 'a/c'"), storage.reading("a/c"):
        pass
    with pytest.raises(UsageError, match="create"):
        local.stored_output("a/b")


def test_a_small_object_in_s3_is_one_request_and_a_large_one_an_upload_in_parts(s3_server: S3Server) -> None:
    storage = Storage(s3_server.uri("small-puts"))
    for n_bytes, n_requests in ((10, 1), (5 << 20, 1), (25 << 20, 5)):
        content = b"x" * n_bytes
        s3_server.asked.clear()
        storage.write_bytes("a/record", content)
        assert len(s3_server.asked) == n_requests, [each.what for each in s3_server.asked]
        s3_server.asked.clear()
        with storage.create("a/segment") as write:
            write(content[: n_bytes // 2])
            write(content[n_bytes // 2 :])
        assert len(s3_server.asked) == n_requests, [each.what for each in s3_server.asked]
        assert storage.read_bytes("a/record") == storage.read_bytes("a/segment") == content


def test_of_a_small_object_in_s3_whose_writer_fails_nothing_stays(s3_server: S3Server) -> None:
    storage = Storage(s3_server.uri("half"))
    with pytest.raises(ValueError, match="in the middle"), storage.create("a/segment") as write:
        write(b"half")
        raise ValueError("in the middle")
    assert not storage.exists("a/segment")


def test_an_arrow_that_does_not_know_the_option_uploads_in_parts(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages, "_SMALL_PUTS", "unknown_to_arrow=true")
    storage = Storage(s3_server.uri("older"))
    s3_server.asked.clear()
    storage.write_bytes("a", b"x")
    assert len(s3_server.asked) == 3
    assert storage.read_bytes("a") == b"x"
    with pytest.raises(ConfigError, match="cannot read the URI"):
        Storage("s3://b/x?region=r&no_option=1").write_bytes("a", b"x")
