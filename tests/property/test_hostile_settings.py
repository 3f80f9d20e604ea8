"""Settings that try to be something else: each is what was written, or one clear ConfigError with status 2.

A file may hold anything, and so may an argument: bytes that are no TOML, values of any type, names that are a path, an
option, a piece of SQL or of Spark's settings. Nothing here has a server, a Ray or a JVM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xidstream.actors.cli.main import cli, main
from xidstream.pipeline.errors import ConfigError, ExitStatus, UsageError
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg_rules import labelled_table, renamed_columns, table_label
from xidstream.pipeline.postgres.conninfo import display, join_secrets, parse, split_secrets
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.settings_file import load_toml
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.sinks.sink import check_sink_spec, sink_type
from xidstream.pipeline.storage.storage import Storage

PIECES = (
    *(
        "..",
        ".",
        "/",
        "//",
        "%2e",
        "%00",
        "%0a",
        "%aa",
        "%",
        "~",
        "~root",
        "-",
        "--help",
        "-rf",
        "\n",
        "\r",
        "\t",
    ),
    *(
        "\0",
        "\x1b[31m",
        "\ud800",
        "\udce9",
        "'",
        '"',
        "`",
        "\\",
        "$",
        "${x}",
        "{}",
        "*",
        ";--",
        ",",
        "=",
        "#",
        "?",
    ),
    *(
        "&",
        "@",
        ":",
        "[",
        "]",
        "::1",
        " ",
        "é" * 40,
        "x" * 255,
        "9" * 20,
        "0xfff",
        "1e400",
        "nan",
        "１",
        "٣MB",
    ),
    *(
        "s3:",
        "s3://",
        "gs://",
        "abfs://",
        "file://",
        "delta:",
        "foreach:",
        "console",
        "os",
        "system",
        "bucket",
    ),
    *(
        "host=",
        "password=",
        "postgresql://",
        "localhost",
        "public.",
        ".t.",
        "spark.",
        "a",
        "1",
        "0/1",
        "true",
    ),
)
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
NUMBERS = st.integers() | st.sampled_from([2**63, 2**5_000]) | st.floats()
VALUES = st.recursive(
    st.booleans() | NUMBERS | TEXT | st.dates() | st.just(datetime.time(1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = [f.name for f in dataclasses.fields(Config)]
AS_WRITTEN = ("dsn", "slot", "buffer_resource", "begin_anew")


@contextlib.contextmanager
def refused_clearly() -> Iterator[None]:
    """Any other error than ours goes through, and fails the test."""
    told: UsageError | None = None
    try:
        yield
    except UsageError as error:  # a ConfigError is one
        told = error
    if told is not None:
        assert told.policy.exit_status is ExitStatus.USAGE
        assert told.message.isprintable() and told.remedy.isprintable()


@settings(max_examples=300)
@given(st.sampled_from(NAMES), VALUES)
@example("spark_conf", {"spark": {"ui": {"enabled": "true"}}})
@example("publication", 5)
@example("proto_version", "4")
@example("linger_ms", 1.5)
@example("block_bytes", "9" * 5000)
@example("storage", "~\0")
def test_a_value_of_any_type_is_the_setting_or_a_clear_error(name: str, value: Any) -> None:
    with refused_clearly():
        (config,) = configs_of({name: value}, {})
        assert repr(config).isprintable()
        if name in AS_WRITTEN:
            assert getattr(config, name) == value
        if isinstance(value, list):
            assert list(getattr(config, name)) == value
        if name == "spark_conf":
            assert list(config.spark_conf) == list(value)
            texts = {k: v for k, v in value.items() if isinstance(v, str)}
            assert {k: config.spark_conf[k] for k in texts} == texts


TOML = st.lists(
    st.sampled_from(
        [*map(repr, PIECES), *PIECES, *NAMES, "[[slots]]\n", "[spark_conf]\n", " = ", "\n", '"""']
    ),
    max_size=12,
).map("".join)


@settings(max_examples=200)
@given(
    TOML.map(lambda text: text.encode(errors="surrogateescape" if text.isascii() else "replace"))
    | st.binary()
)
@example(b"linger_ms = " + b"9" * 5000)
@example(b"slot = " + b"[" * 100_000)
@example(b"linger_ms = 0x" + b"f" * 5000)
@example(b'slot = "\xe9"')
def test_a_file_of_any_bytes_is_settings_or_a_clear_error(content: bytes) -> None:
    with TemporaryDirectory(prefix="xs-") as folder:
        file = Path(folder, "shop.toml")
        file.write_bytes(content)
        with refused_clearly():
            assert all(repr(config).isprintable() for config in configs_of(load_toml(file), {}))


@pytest.mark.parametrize("path", ["a\0b", "~\0", "x" * 300, "", "~nobody-of-this-name/x", "\ud800"])
def test_a_path_of_a_file_that_can_be_none_is_a_clear_error(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_toml(Path(path))
    assert caught.value.message.isprintable()


def _both_parts(dsn: str) -> None:
    bare, secrets = split_secrets(dsn)
    assert parse(join_secrets(bare, secrets)) == parse(dsn)


def _storage(text: str) -> None:
    storage = Storage(text)
    if not text.lower().startswith("s3:"):  # which asks the store where its bucket is
        assert storage.local_root is None or os.path.isabs(storage.local_root)


READERS: dict[str, Callable[[str], Any]] = {
    "sink": check_sink_spec,
    "Delta root": lambda text: sink_type(f"delta:{text}").local_root(),
    "location": Location.parse,
    "storage": _storage,
    "dsn": _both_parts,
    "shown dsn": display,
    "two sinks": lambda text: configs_of(
        {"slots": [{"slot": "a", "sink": f"delta:{text}"}, {"slot": "b", "sink": "delta:s3://x"}]}, {}
    ),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=150)
@given(text=TEXT)
@example(text="gs://[")
@example(text="host=a\0 password=b")
@example(text="\udce9")
def test_what_reads_a_setting_takes_it_or_says_clearly_why_not(name: str, text: str) -> None:
    with refused_clearly():
        READERS[name](text)


@settings(max_examples=200)
@given(*[st.text(min_size=1, max_size=12)] * 4)
@example('a"b', ".", 'c"', "d")
@example("a.b", '"', "x=y", "z")
def test_a_column_that_gets_another_name_is_that_column_of_that_table(
    schema: str, table: str, column: str, name: str
) -> None:
    entry = f"{table_label(schema, table)}.{column}={name}"
    assert labelled_table(table_label(schema, table)) == (schema, table)
    if "=" not in name:
        assert renamed_columns([entry]) == {(schema, table): {column: name}}


HOSTILE_ARGUMENTS = (
    ("--slot", "../../etc"),
    ("--slot", "-rf"),
    ("--slot", "s;drop"),
    ("--publication", "x" * 64),
    ("--publication", "p,p"),
    ("--storage", "a\nb"),
    ("--storage", "gs://["),
    ("--storage", "~nobody-of-this-name/x"),
    ("--sink", "delta:a\x1b[31mb"),
    ("--sink", "delta:file://[/x"),
    ("--column-names", "t=x"),
    ("--block-bytes", "٣MB"),
    ("--spark-executor-memory", "٩٩٩m"),
    ("--status-address", "a b:1"),
    ("--begin-anew", "../1"),
    ("--linger-ms", "9" * 30),
)


@pytest.mark.parametrize("command", ["run", "check", "capture"])
@pytest.mark.parametrize("argument", HOSTILE_ARGUMENTS, ids=repr)
def test_a_hostile_argument_ends_with_status_2_before_anything_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    argument: tuple[str, str],
) -> None:
    if command == "capture" and argument[0] in ("--sink", "--spark-executor-memory"):
        pytest.skip("it has no sink")
    monkeypatch.chdir(tmp_path)
    given = {"--dsn": "host=127.0.0.1 port=1", "--slot": "s", "--publication": "p", "--storage": "s"}
    if command != "capture":
        given["--sink"] = "delta:d"
    options = [part for pair in {**given, argument[0]: argument[1]}.items() for part in pair]
    with pytest.raises(SystemExit) as ended:
        main([command, *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "Traceback" not in said and "unexpected" not in said and "\x1b" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_real_command_line_takes_bytes_that_are_no_text_and_a_hostile_file(tmp_path: Path) -> None:
    file = tmp_path / "-rf \n.toml"
    file.write_text('publication = 5\n[spark_conf]\nspark.ui.enabled = "true"\n')
    cases = (
        ["check", "--config", str(file)],
        ["check", "--config=" + file.name],
        ["run", b"--storage=caf\xe9", "--slot", "s"],
        ["run", "--dsn", b"host=\xff", "--slot", "s", "--publication", "p", "--storage=s", "--sink=console"],
    )
    for arguments in cases:
        ended = subprocess.run(
            [sys.executable, "-m", "xidstream.actors", *arguments],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            check=False,
            timeout=120,
        )
        said = ended.stderr.decode(errors="replace")
        assert ended.returncode == 2, said
        assert said.startswith("xidstream: ") and said.count("\n") == 2 and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def commands_of(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, *path, name)
        else:
            yield (*path, name), command


ASKING = [
    each for each in commands_of(cli) if each[0][0] in ("journal", "slot", "snapshot", "table", "source")
]
USUAL = {"slot": "s", "storage": "./st", "publication": "p", "sink": "delta:d", "tables": "public.t"}
NOBODY_LISTENS = "--dsn=host=127.0.0.1 port=1"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_command_is_surprised_by_what_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    monkeypatch.chdir(tmp_path)
    path, command = data.draw(st.sampled_from(ASKING))
    arguments = [*path, NOBODY_LISTENS] if any(p.name == "dsn" for p in command.params) else [*path]
    for parameter in command.params:
        if parameter.name in ("dsn", "config_file", "password_command") or data.draw(st.integers(0, 4)) == 0:
            continue
        if isinstance(parameter, click.Argument) or not getattr(parameter, "is_flag", False):
            usual = USUAL.get(str(parameter.name))
            typed = usual if usual and data.draw(st.booleans()) else data.draw(TEXT).replace("\0", "")
            arguments.append(f"{parameter.opts[0]}={typed}" if parameter.opts[0][0] == "-" else str(typed))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code in (0, 1, 2, 3), said.err
    assert "unexpected" not in said.err and "\x1b[31m" not in said.err + said.out
