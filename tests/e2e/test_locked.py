"""One real run on one machine, and the tables of docs/security.md: what listens, what is on the disk, who gets in.

The page is read by the test, so the two cannot drift apart.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.stranger import asked
from tests.e2e.test_command_line import (
    NEWEST,
    ROWS,
    SMALL_SEGMENTS,
    ask_for_spark,
    delta,
    environment,
    marked,
    options,
    set_up,
)
from tests.postgres_fixtures import Database
from tests.processes import Living, living_below
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e]

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
PASSWORD = "hunter2-of-the-environment"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def table(first_cell: str) -> list[list[str]]:
    """The cells of the page's first table whose header begins so, without backticks."""
    lines = iter(PAGE[PAGE.index(f"| {first_cell} |") :].splitlines()[2:])
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def process_of(found: Living, run: int) -> str:
    """As the page names it."""
    words = found.command
    if found.process.pid == run:
        return "xidstream"
    if words and (actor := re.match(r"ray::\w+", words[0])):
        return actor[0]
    scripts = [word.rpartition("/")[2] for word in words if word.endswith(".py")]
    if scripts:
        return scripts[0]
    return "pipeline.spark.daemon" if "xidstream.pipeline.spark.daemon" in words else found.name


def listening(processes: list[Living], run: int) -> dict[int, tuple[str, str]]:
    """Port → process and address."""
    found = {}
    for each in processes:
        try:
            for socket in each.process.net_connections("inet"):
                if not socket.raddr and socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    found[socket.laddr.port] = process_of(each, run), socket.laddr.ip
        except psutil.NoSuchProcess:
            continue
    return found


def modes_below(roots: dict[str, Path]) -> Iterator[tuple[str, Path, str]]:
    """Row of the page, path, and its mode. A path counts for the innermost of the roots that it is in."""
    places = sorted(roots.items(), key=lambda root: -len(str(root[1])))
    for top in roots.values():
        for path in [top, *top.rglob("*")]:
            try:
                facts = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
                row = next(name for name, root in places if path == root or root in path.parents)
                kind = "folders" if stat.S_ISDIR(facts.st_mode) else "files"
                yield f"{row} {kind}", path, f"{stat.S_IMODE(facts.st_mode):04o}"


@pytest.mark.slow
@NEWEST
def test_a_run_on_one_machine_listens_and_writes_as_the_page_says_and_lets_no_other_login_in(
    database: Database, tmp_path: Path, short_folder: Path
) -> None:
    set_up(database)
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", f"s_{database.name}"[:63])
    database.execute(ROWS.format(1, 1000))
    others = ask_for_spark(database.execute, 1001)
    short_folder.chmod(0o755)  # whoever has a login comes to the run's own folders, and no further
    home = short_folder / "home"
    home.mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "actors",
            *options(database, short_folder),
            *SMALL_SEGMENTS,
            "--metrics-address",
            "127.0.0.1:0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(
            {
                "XIDSTREAM_TEST_MARK": str(tmp_path),
                "RAY_TMPDIR": str(short_folder),
                "HOME": str(home),
                "PGPASSWORD": PASSWORD,
            }
        ),
    )
    try:
        is_whole = lambda: len(delta(short_folder, "_transactions")) == 3
        wait_until(lambda: is_whole() or process.poll() is not None, 180)
        assert process.poll() is None, process.communicate()[0]
        run = psutil.Process(process.pid)
        processes = [Living(run, run.name(), tuple(run.cmdline())), *living_below(process.pid)]
        ports = listening(processes, process.pid)
        (folder,) = short_folder.glob("xids-*")
        roots = {
            "storage": short_folder / "segments",
            "sink": short_folder / "delta",
            "~/.ray": home / ".ray",
            "xids-…": folder,
            "xids-…/r": folder / "r",
            "xids-…/t": folder / "t",
        }
        (session,) = (folder / "r").glob("session_2*")
        closed = [*roots.values(), home / ".ray" / "auth_token", session, *(session / "sockets").iterdir()]
        closed += [path for name in ("segments", "delta") for path in (short_folder / name).rglob("*")]
        answers, rights = asked(list(ports), closed)
        found_modes = list(modes_below(roots))
        unexpected = written_elsewhere(processes, short_folder)
        telling = [process_of(each, process.pid) for each in processes if tells(each, PASSWORD)]
        (jvm,) = [each for each in processes if each.name == "java"]
        mapped = [each.path for each in jvm.process.memory_maps()]
        samples = metrics_at(ports, answers)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert [row["id"] for row in delta(short_folder, "public.t")] == [*range(1, 1001), *others]
    assert not marked(str(tmp_path))

    # The reader has it, too, and was not started with it.
    assert len(processes) > 10 and telling == ["xidstream"]
    outside = {port: found for port, found in ports.items() if found[1] not in LOOPBACK}
    assert outside == {}
    listed = {(row[0], row[2], row[3]): row[1] for row in table("process")}
    seen = {(name, *answers[port]) for port, (name, _) in ports.items()}
    assert seen - listed.keys() == set(), "these listen, and the page does not say so"
    sometimes = {key for key, address in listed.items() if ":" in address or key[0] == "ray::IDLE"}
    assert listed.keys() - seen - sometimes == set(), "the page has these, and they do not listen"

    modes = {}
    for row in table("folder"):
        modes[f"{row[0]} folders"], modes[f"{row[0]} files"] = row[1], row[2]
    wrong = {str(path): mode for row, path, mode in found_modes if modes[row] not in (mode, "any")}
    assert wrong == {} and {row for row, _, _ in found_modes} >= {
        "storage files",
        "sink files",
        "~/.ray files",
    }
    assert unexpected == [] and [path.name for path in home.iterdir()] == [".ray"]
    assert "Component=" in samples and not re.search(r'="[^"]*/', samples)
    # Another login may have put a library there.
    assert not [path for path in mapped if path.startswith("/tmp/ray/")]
    if os.geteuid() != 0:
        pytest.skip("only root may become another user: what the files' modes mean was not tried")
    assert {path: may for path, may in rights.items() if may} == {}


def tells(found: Living, secret: str) -> bool:
    """Whether a process was started with it, as an argument or in its environment."""
    texts = [Path(f"/proc/{found.process.pid}/{name}") for name in ("cmdline", "environ")]
    return any(path.exists() and secret.encode() in path.read_bytes() for path in texts)


def written_elsewhere(processes: list[Living], folder: Path) -> list[str]:
    """Files that the run has open to write to, and that are in none of its folders."""
    found = []
    for each in processes:
        try:
            for file in each.process.open_files():
                inside = file.path.startswith((f"{folder}/", "/dev/"))
                if not inside and file.mode != "r":
                    found.append(file.path)
        except psutil.NoSuchProcess:
            continue
    return found


def metrics_at(ports: dict[int, tuple[str, str]], answers: dict[int, tuple[str, str]]) -> str:
    """What the run's own process gives to Prometheus, when Ray has counted for the first time."""
    pages = [port for port, found in ports.items() if found[0] == "xidstream" and answers[port][0] == "HTTP"]
    text = ""

    def is_there() -> bool:
        nonlocal text
        for port in pages:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    text = answer.read().decode()
            except urllib.error.HTTPError:
                continue
        return 'Component="ray::' in text

    wait_until(is_there)
    return text
