"""Names of Delta tables and what is taken for their root."""

from __future__ import annotations

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.spark.naming import Location, decode_table, encode, encode_table


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("orders_2-A", "orders_2-A"),
        ("a.b", "a~2Eb"),
        ("~", "~7E"),
        ("../x", "~2E~2E~2Fx"),
        ("päck", "p~C3~A4ck"),
        ("100%", "100~25"),
        (" ", "~20"),
        ("", ""),
    ],
)
def test_name_is_encoded_as_the_contract_says(name: str, encoded: str) -> None:
    assert encode(name) == encoded


@pytest.mark.parametrize("name", [("public", "t"), ("a.b", "c"), ("a", "b.c"), ("Ü", "~2E"), ("x y", "%20")])
def test_table_directory_is_reversible_and_has_one_separator(name: tuple[str, str]) -> None:
    directory = encode_table(*name)
    assert directory.count(".") == 1
    assert decode_table(directory) == name


def test_dot_in_schema_and_dot_in_table_are_different_directories() -> None:
    assert encode_table("a.b", "c") != encode_table("a", "b.c")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/data/x/", "/data/x"),
        ("file:///data/a%20b", "/data/a b"),
        ("file:/data/x", "/data/x"),
        ("s3://bucket/x/", "s3://bucket/x"),
        ("gs://bucket", "gs://bucket"),
        ("abfs://c@account.dfs.core.windows.net/x", "abfs://c@account.dfs.core.windows.net/x"),
    ],
)
def test_root_is_a_path_or_a_uri(uri: str, expected: str) -> None:
    assert Location.parse(uri).uri == expected


def test_relative_root_is_made_absolute(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert Location.parse("out/delta").uri == f"{tmp_path}/out/delta"


@pytest.mark.parametrize(
    "uri", ["", "http://x/y", "s3:", "s3://", "file://host/x", "/a%20b", "file:///a%2520b"]
)
def test_bad_root_is_a_config_error(uri: str) -> None:
    with pytest.raises(ConfigError):
        Location.parse(uri)


def test_storage_options_are_not_in_repr() -> None:
    assert "hunter2" not in repr(Location.parse("s3://b/x", {"aws_secret_access_key": "hunter2"}))
