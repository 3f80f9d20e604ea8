"""Who else may log in: of the lines of a passwd file, those of people."""

from __future__ import annotations

import pwd

import pytest

from xidstream.actors.runtime.other_logins import logins_among


def account(name: str, uid: int, shell: str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", f"/home/{name}", shell))


@pytest.mark.parametrize(
    ("uid", "shell", "counts"),
    [
        (1000, "/bin/bash", True),
        (1000, "", True),  # passwd(5): /bin/sh
        (1000, "/usr/sbin/nologin", False),
        (1000, "/bin/false", False),
        (999, "/bin/bash", False),
        (0, "/bin/bash", False),
        (65534, "/bin/sh", False),
        (4711, "/bin/bash", False),
    ],
)
def test_an_account_counts_if_somebody_else_may_log_in_with_it(uid: int, shell: str, counts: bool) -> None:
    assert logins_among([account("anna", uid, shell)], own_uid=4711) == (["anna"] if counts else [])
