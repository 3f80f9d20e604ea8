"""Who else may log in to this machine, as far as its list of accounts tells.

``run`` asks where Spark is RayDP's, whose gateway lets every login in (docs/security.md). Accounts of a directory
service that does not list them stay unknown.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from typing import Final

_NO_SHELLS: Final = ("nologin", "false", "sync", "shutdown", "halt")
_FIRST_OF_PEOPLE: Final = 1000
_NOBODY: Final = 65534


def other_logins() -> list[str]:
    """The names of accounts with a shell, without this process's user, services and root."""
    return logins_among(pwd.getpwall(), os.geteuid())


def logins_among(accounts: Iterable[pwd.struct_passwd], own_uid: int) -> list[str]:
    return [
        account.pw_name
        for account in accounts
        if account.pw_uid >= _FIRST_OF_PEOPLE
        and account.pw_uid not in (own_uid, _NOBODY)
        and os.path.basename(account.pw_shell) not in _NO_SHELLS
    ]
