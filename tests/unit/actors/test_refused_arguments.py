"""What ``run`` refuses before it asks anybody: there is no server where its DSN leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from xidstream.actors.cli.main import main

COMPLETE = [
    "run",
    "--dsn",
    "host=127.0.0.1 port=1 dbname=x",
    "--slot",
    "s",
    "--publication",
    "p",
    "--create-slot",
]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--slot", "Bad-Name"], "a-z, 0-9 and _"),
        (["--sink", "nothing:here"], "unknown sink"),
        (["--sink", "foreach:no_such_module:f"], "no_such_module"),
        (["--streaming", "sideways"], "sideways"),
        (["--block-bytes", "lots"], "block_bytes"),
        (["--config", "absent.toml"], "absent.toml"),
    ],
)
def test_an_argument_that_is_wrong_is_one_clear_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], says: str
) -> None:
    where = ["--storage", str(tmp_path / "segments"), "--sink", f"delta:{tmp_path / 'delta'}"]
    with pytest.raises(SystemExit) as ended:
        main([*COMPLETE, *where, *change])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert says in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--table", "public.t"], "--key"),
        (["--key", "id = 90125"], "--table"),
        (["--table", "public.t", "--key", "id > 90125"], "--key number 1 has a range"),
        (
            ["--table", "public.t", "--keys-file", "absent.keys"],
            "the file of keys absent.keys cannot be read",
        ),
        (["--table", "public.t", "--key", "id = 90125", "--id", "../x"], "the id of an erasure"),
    ],
)
def test_an_erasure_without_all_that_it_needs_is_refused_without_the_keys_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    where = ["--slot", "s", "--storage", str(tmp_path / "segments"), "--sink", f"delta:{tmp_path / 'delta'}"]
    with pytest.raises(SystemExit) as ended:
        main(["erase", "--dsn", "host=127.0.0.1 port=1 dbname=x", *where, *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and "90125" not in said
