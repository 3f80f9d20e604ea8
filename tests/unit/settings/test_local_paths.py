"""Paths that people write: one place, whatever the working directory; and two places that are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.local_paths import overlap
from xidstream.pipeline.settings.settings_file import load_toml
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.sinks.sink import check_sink_spec
from xidstream.pipeline.sinks.sink_findings import check_of_spec
from xidstream.pipeline.storage.storage import Storage


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's; the working directory is another."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_a_tilde_is_the_home_folder_in_storage_sink_and_the_settings_file(home: Path) -> None:
    (home / "shop.toml").write_text('storage = "~/seg ments"\nsink = "delta:~/tables"\n')
    config = Config.of(load_toml(Path("~/shop.toml")))
    assert (config.storage, config.sink) == (f"{home}/seg ments", f"delta:{home}/tables")
    assert Storage("~/x").local_root == f"{home}/x"
    assert Location.parse("~/x").uri == Location.parse("file:~/x").uri == f"{home}/x"


def test_a_relative_path_is_the_same_place_after_the_working_directory_changed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(storage="segments", sink="delta:tables")
    work = Path.cwd()
    monkeypatch.chdir(home)
    assert config.storage == str(work / "segments")
    assert config.sink == check_sink_spec(config.sink) == f"delta:{work / 'tables'}"


def test_the_home_folder_of_nobody_is_refused_and_a_folder_with_such_a_name_can_be_written(
    home: Path,
) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(storage="~no_such_login/x")
    assert "~no_such_login" in refused.value.message and "./~no_such_login/x" in refused.value.remedy
    assert Config(storage="./~no_such_login/x").storage == str(Path.cwd() / "~no_such_login/x")


def test_uris_stay_as_they_are() -> None:
    for uri in ("s3://bucket/~x", "gs://bucket/x", "file:/a/b"):
        assert (Config(storage=uri).storage, Config(sink=f"delta:{uri}").sink) == (uri, f"delta:{uri}")
    assert Config(sink="foreach:a:b").sink == "foreach:a:b"


@pytest.mark.parametrize(
    ("one", "other", "is_so"),
    [
        ("/data/tables", "/data/tables/", True),
        ("/data", "file:/data/tables", True),
        ("/data/tables", "/data/tables2", False),
        ("s3://bucket/x", "s3a://bucket/x/y", True),
        ("s3://KEY:GEHEIM@bucket/x?region=r", "s3://bucket/x", True),
        ("s3://bucket/x", "s3://other/x", False),
        ("s3://bucket/x", "gs://bucket/x", False),
        ("abfs://a@account/x", "abfs://b@account/x", False),
    ],
)
def test_two_places_overlap_where_one_is_the_other_or_is_in_it(one: str, other: str, is_so: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is is_so


def test_a_link_to_the_storage_is_the_storage(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "tables").symlink_to("segments")
    assert overlap(str(tmp_path / "tables"), str(tmp_path / "segments"))


@pytest.mark.parametrize(("storage", "sink"), [("x", "x"), ("x", "x/tables"), ("x/segments", "x")])
def test_storage_and_sink_in_one_folder_are_refused_and_nothing_is_made(
    home: Path, storage: str, sink: str
) -> None:
    (found,) = check_of_spec(f"delta:{home / sink}", str(home / storage))(None)
    assert found.raises is ConfigError
    assert str(home / sink) in found.statement and str(home / storage) in found.statement
    assert list(home.iterdir()) == []


def test_two_slots_whose_sinks_are_in_each_other_are_refused() -> None:
    common = {"dsn": "host=db", "publication": "p", "storage": "/segments"}
    slots = [{"slot": "a", "sink": "delta:/x"}, {"slot": "b", "sink": "delta:/x/current"}]
    with pytest.raises(ConfigError, match="in the other's"):
        configs_of({**common, "slots": slots}, {})


@pytest.mark.parametrize("spec", ["/path", "tables", "s3://bucket/x", "file:/x"])
def test_a_sink_without_its_kind_is_answered_with_the_one_that_was_meant(spec: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sink_spec(spec)
    assert refused.value.remedy == f"did you mean delta:{spec}?"


def test_a_sink_without_its_place_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        check_sink_spec("delta:")
    assert "names no folder" in refused.value.message and "delta:URI" in refused.value.remedy
