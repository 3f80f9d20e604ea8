"""Who may read what a run writes: the modes of folders and files, and what ``check`` says of older ones."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings import file_modes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import planted_link, who_else, who_may_move
from xidstream.pipeline.sinks.sink import make_root
from xidstream.pipeline.storage.storage import Storage

OTHER_LOGIN = 65534


def modes_below(folder: Path) -> tuple[set[int], set[int]]:
    """Of folders, this one among them, and of files."""
    found = [folder, *folder.rglob("*")]
    of = [(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found]
    return {mode for is_dir, mode in of if is_dir}, {mode for is_dir, mode in of if not is_dir}


def write(storage: Storage) -> None:
    storage.write_bytes("slot/record", b"a row's value")
    with storage.create("slot/epochs/e/0.parquet") as append:
        append(b"rows")


@pytest.mark.parametrize("umask", [0, 0o022])
def test_what_the_storage_writes_is_its_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    os.umask(umask)
    write(Storage(str(tmp_path / "new" / "storage")))
    assert modes_below(tmp_path / "new") == ({0o700}, {0o600})


def test_a_group_may_read_where_the_owner_says_so(tmp_path: Path) -> None:
    file_modes.choose_for_process("0750")
    write(Storage(str(tmp_path / "storage")))
    (tmp_path / "storage" / "by_a_library").touch()
    assert modes_below(tmp_path / "storage") == ({0o750}, {0o640})


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage").chmod(0o755)
    write(Storage(str(tmp_path / "storage")))
    assert stat.S_IMODE((tmp_path / "storage").stat().st_mode) == 0o755
    assert modes_below(tmp_path / "storage" / "slot") == ({0o700}, {0o600})


def test_the_root_of_a_scripts_tables_is_made_private_and_one_that_is_there_is_left_alone(
    tmp_path: Path,
) -> None:
    os.umask(0o022)
    make_root(f"delta:{tmp_path / 'lake' / 'shop'}")
    assert modes_below(tmp_path / "lake") == ({0o700}, set())
    (tmp_path / "lake").chmod(0o755)
    make_root(f"delta:{tmp_path / 'lake'}")
    make_root("console")
    assert stat.S_IMODE((tmp_path / "lake").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_login_reads_no_row(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    write(Storage(str(short_folder / "storage")))
    for path in (short_folder / "storage", short_folder / "storage" / "slot" / "record"):
        tried = subprocess.run(
            [sys.executable, "-c", f"import os; os.setuid({OTHER_LOGIN}); open({str(path)!r}).read()"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "PermissionError" in tried.stderr


@pytest.mark.parametrize(
    ("mode", "said"), [(0o755, "every login of this machine may read it"), (0o700, None)]
)
def test_a_folder_is_told_of_that_others_may_read(short_folder: Path, mode: int, said: str | None) -> None:
    short_folder.chmod(0o755)
    folder = short_folder / "storage"
    folder.mkdir()
    folder.chmod(mode)
    assert who_else(str(folder), "0700") == said
    assert who_else(str(folder), "0755") is None
    folder.chmod(0o777)
    assert who_else(str(folder), "0755") == "every login of this machine may change it"
    folder.chmod(0o750)
    assert who_else(str(folder), "0700") == "its group may read it"
    short_folder.chmod(0o700)
    assert who_else(str(folder), "0700") is None, "nobody gets there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_link_that_another_login_has_planted_is_found_and_ones_own_is_not(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    storage, victim = short_folder / "storage", short_folder / "victim"
    (storage / "1" / "slot").mkdir(parents=True)
    victim.mkdir()
    (storage / "own").symlink_to(victim)
    assert planted_link(str(storage), 3) is None
    for planted in (storage / "2", storage / "1" / "slot" / "epochs", short_folder / "elsewhere"):
        planted.symlink_to(victim)
        os.chown(planted, OTHER_LOGIN, OTHER_LOGIN, follow_symlinks=False)
        root = planted if planted.parent == short_folder else storage
        assert planted_link(str(root), 3) == str(planted)
        planted.unlink()
    assert planted_link(str(storage), 3) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_whoever_could_replace_the_folder_is_told_of(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    above, storage = short_folder / "above", short_folder / "above" / "storage"
    storage.mkdir(parents=True)
    assert who_may_move(str(storage)) is None
    above.chmod(0o777)
    assert who_may_move(str(storage)) == f"every login of this machine may change {above}"
    above.chmod(0o1777)
    assert who_may_move(str(storage)) is None, "as in /tmp"
    for folder in (above, storage):
        os.chown(folder, OTHER_LOGIN, OTHER_LOGIN)
        assert who_may_move(str(storage)) == f"{folder} belongs to nobody"
    short_folder.chmod(0o700)
    assert who_may_move(str(storage)) is None, "nobody gets there"


@pytest.mark.parametrize("text", ["", "700", "0750", "755", "0o700", "600", "0777", "07000", "rwx"])
def test_a_mode_is_three_octal_digits_and_keeps_the_owners_rights(text: str) -> None:
    if text in ("700", "0750", "755"):
        assert Config(storage_mode=text).storage_mode == text
        return
    with pytest.raises(ConfigError, match="storage_mode"):
        Config(storage_mode=text)
