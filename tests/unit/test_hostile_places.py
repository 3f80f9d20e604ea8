"""Paths and URIs of storage and tables, and names in them: each is that place and no other, or one clear error."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.storage.conftest import files_below
from xidstream.pipeline.errors import ConfigError, StorageFault, UsageError
from xidstream.pipeline.log_tables.locations import Location, decode_table, encode_table
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink import make_root, sink_type
from xidstream.pipeline.storage.storage import Storage

KEY = "1/s/progress.json"
CONTROL = ("a\0b", "a\nb", "a\rb", "\x1b[31m", "a%00b", "a%0Ab", "caf\udce9", "%ff")
PIECES = st.sampled_from(
    [
        "..",
        ".",
        "/",
        "%2e",
        "%",
        "[",
        "]",
        "^",
        "|",
        "#",
        "?",
        "&",
        "~",
        "'",
        '"',
        "`",
        "\\",
        "$",
        "{}",
        "*",
        "a",
        "é" * 128,
        "x" * 255,
        " ",
    ]
)


@pytest.mark.parametrize("text", CONTROL)
@pytest.mark.parametrize("scheme", ["", "file:///tmp/", "s3://bucket/"])
def test_control_characters_in_a_place_are_refused_in_one_line_that_does_not_repeat_it(
    text: str, scheme: str
) -> None:
    for make in (Storage, Location.parse, lambda uri: make_root(f"delta:{uri}")):
        with pytest.raises(ConfigError, match="without control characters") as caught:
            make(f"{scheme}{text}hunter2")
        assert caught.value.message.isprintable() and "hunter2" not in caught.value.message


@settings(max_examples=60)
@given(st.lists(PIECES, min_size=1, max_size=5).map("".join))
@example("-rf")
@example("a" * 255)
@example("a" * 256)
@example("%aa")
@example("a\\b")
@example("a[b]^|")
@example("a b #?&'\"`{}*$~é")
def test_a_path_is_the_folder_that_the_operating_system_means_by_it_or_an_error(name: str) -> None:
    with TemporaryDirectory(prefix="xs-") as top:
        below = os.path.join(top, "1", "2", "3", "4", "5")  # more than the pieces can climb
        os.makedirs(below)
        path = f"{below}/{name}"
        meant = os.path.abspath(path)
        if not unquote(name, errors="surrogateescape").isprintable():  # %aa is no UTF-8
            with pytest.raises(ConfigError, match="control characters"):
                Storage(path)
            return
        if max(len(part.encode()) for part in meant.split("/")) > 255:
            with pytest.raises(StorageFault, match="File name too long"):
                Storage(path).write_bytes(KEY, b"x")
        else:
            storage = Storage(path)
            storage.write_bytes(KEY, b"x")
            assert storage.read_bytes(KEY) == b"x" and storage.list_keys("1") == [KEY]
            assert Path(meant, KEY).read_bytes() == b"x"
        if set(meant) & set("%\\[]^|"):
            with pytest.raises(ConfigError, match="cannot hold"):
                sink_type(f"delta:{path}").local_root()
        else:
            assert sink_type(f"delta:{path}").local_root() == meant
            if os.path.isdir(meant):
                write_deltalake(Location.parse(path).child("t").uri, pa.table({"a": [1]}))
                assert Path(meant, "t", "_delta_log", f"{0:020d}.json").exists()


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), st.text(max_size=20))
@example("..", "/")
@example("\0", "\n")
def test_a_tables_folder_is_one_part_of_a_path_whatever_its_name(schema: str, table: str) -> None:
    try:
        schema.encode(), table.encode()
    except UnicodeEncodeError:
        return
    folder = encode_table(schema, table)
    assert folder.isascii() and len(folder) <= 255 and not set(folder) - set(folder.replace("/", ""))
    assert folder.isprintable() and not folder.startswith("..")
    if "~~" not in folder:
        assert decode_table(folder) == (schema, table)


@given(st.text(max_size=70))
@example("a\n")
@example("a" * 64)
@example("../x")
@example("ａ")
def test_a_slots_name_is_what_postgresql_allows_or_refused(name: str) -> None:
    allowed = 0 < len(name) < 64 and not set(name) - set("abcdefghijklmnopqrstuvwxyz0123456789_")
    if allowed or not name:
        Config(slot=name)
        return
    with pytest.raises(ConfigError) as caught:
        Config(slot=name)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("uri", "of_storage"),
    [
        ("s3://bucket/a#b", True),  # each of these was a folder above, or one that several tables shared
        ("s3://bucket/a/../b", True),
        ("s3://bucket/%2e%2e/b", True),
        ("gs://bucket/./b", True),
        ("file:///a#b", True),
        ("file:///a?b", True),
        ("s3://bucket/a?region=us-east-1", False),  # the storage's own form
        ("gs://[", True),
    ],
)
def test_a_uri_that_leads_to_another_place_than_it_seems_to_is_refused(uri: str, of_storage: bool) -> None:
    for make in (Location.parse, lambda text: Config(sink=f"delta:{text}") and Location.parse(text)):
        with pytest.raises(ConfigError):
            make(uri)
    if of_storage:
        for refused in (lambda: Storage(uri), lambda: Config(storage=uri)):
            with pytest.raises(ConfigError):
                refused()
    else:
        assert Storage(uri).uri.startswith(uri)


@pytest.mark.parametrize("key", ["", "..", "a/../b", "/a", "a//b", "a/", "./a"])
def test_a_key_leads_nowhere_else(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError):
        Storage(str(tmp_path)).write_bytes(key, b"x")


def test_a_link_that_somebody_has_planted_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    place = tmp_path / "storage" / KEY
    place.parent.mkdir(parents=True)
    storage = Storage(str(tmp_path / "storage"))
    for write in (lambda: storage.write_bytes(KEY, b"x"), lambda: _create(storage)):
        place.unlink(missing_ok=True)
        place.symlink_to(victim)
        write()
        assert not place.is_symlink() and place.read_bytes() == b"x" and victim.read_bytes() == b"mine"
    assert files_below(tmp_path / "storage") == {KEY}


def _create(storage: Storage) -> None:
    with storage.create(KEY) as append:
        append(b"x")
