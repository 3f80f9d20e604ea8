"""Names of Delta tables and what is taken for their root."""

from __future__ import annotations

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.log_tables.locations import (
    MAX_DIRECTORY,
    Location,
    decode_table,
    encode,
    encode_table,
)


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


LONG = "ж" * 31  # 63 bytes is what PostgreSQL gives a name


def test_the_longest_directory_that_fits_is_not_cut() -> None:
    schema = "ж" * 31
    table = "é" * 11 + "x" * (MAX_DIRECTORY - 6 * 31 - 1 - 66)
    assert len(encode_table(schema, table)) == MAX_DIRECTORY
    assert decode_table(encode_table(schema, table)) == (schema, table)
    assert len(encode_table(schema, table + "x")) <= MAX_DIRECTORY
    assert "~~" in encode_table(schema, table + "x")


def test_a_directory_that_is_too_long_is_cut_between_characters_and_has_a_digest() -> None:
    """It stands in people's storage: another digest or another place would begin the table anew."""
    directory = encode_table(LONG, LONG)
    assert directory == f"{'~D0~B6' * 31}.{'~D0~B6' * 5}~~d905ea83ea0aac9111f0e9768f07e394"
    with pytest.raises(ValueError, match="all of its table's name"):
        decode_table(directory)


@pytest.mark.parametrize("character", ["x", "é", "€", "😀", ".", "~"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_no_character_is_torn_wherever_the_cut_falls(character: str, shift: int) -> None:
    directory = encode_table("s" * shift + "😀" * 15, character * (63 // len(character.encode())))
    assert len(directory) <= MAX_DIRECTORY
    schema, table = decode_table(directory.partition("~~")[0])
    assert schema == "s" * shift + "😀" * 15
    assert set(table) <= {character}


def test_tables_that_differ_behind_the_cut_or_in_where_their_schema_ends_have_different_directories() -> None:
    names = [
        (LONG, LONG),
        (LONG, LONG + "x"),
        (LONG, LONG[:-1] + "é"),
        (LONG + ".", LONG),
        (LONG, "." + LONG),
    ]
    assert len({encode_table(*name) for name in names}) == len(names)


def test_a_table_that_is_named_as_the_directory_of_another_has_one_of_its_own() -> None:
    cut = encode_table(LONG, LONG)
    schema, _, table = cut.partition(".")
    assert encode_table(schema, table) != cut


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
