"""A handle on one version of a Delta table that remembers the versions of application transactions.

Delta's log says which version an application id committed last. deltalake looks for it in the whole log, from the
newest commit back to the last checkpoint, whenever it is asked, which costs as much as a commit. Here each is looked
for once. When the handle goes on to a later version, what lies between is known in one of two ways: a commit of the
caller's own, by what the caller says it set (``take_own``), and any other, by the one file that it is in the log. So a
writer that is alone reads nothing, and a reader of a log that others write reads each commit once. Who looks for all
ids of the log gets those that were read here (``take_ids``), and need not read the same commits again.

Example: a table is at version 7, where the application ``s`` has 500. The caller commits ``s`` = 600 as version 8, and
says so. Somebody else commits version 9, with ``t`` = 3. The next question reads version 9 alone: ``s`` is 600, and
``t``, which nobody asked for before, is looked for by deltalake when somebody does.

Called by ``delta_table``, which writes, and ``kept_tables``, which keeps handles from one look to the next. deltalake
only.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from deltalake import DeltaTable

from xidstream.pipeline.log_tables.locations import Location

_MOST_IDS: Final = 100
"""Commits whose ids are kept until somebody takes them: nobody may. Who does needs those after the last checkpoint."""


class TableHandle(DeltaTable):
    def __init__(self, location: Location, version: int | None = None) -> None:
        super().__init__(location.uri, version=version, storage_options=location.storage_options)
        self._location = location
        self._transactions: dict[str, int | None] = {}
        """By application id, None for one that has committed nothing; of the version ``_noted``."""
        self._noted = self.version()
        self._last_read = -1, b""
        """A version, and its commit."""
        self._ids: OrderedDict[int, frozenset[str]] = OrderedDict()

    def transaction_version(self, app_id: str) -> int | None:
        """The version last committed under this id in the handle's version of the table. Raises OSError, too."""
        for version in range(self._noted + 1, self.version() + 1):
            read, commit = self._last_read
            commit = commit if read == version else self.commit_of(version)
            if not commit:  # a checkpoint has replaced it
                self._transactions.clear()
                break
            said = _transactions_of(commit)
            self._ids[version] = frozenset(said)
            if len(self._ids) > _MOST_IDS:
                self._ids.popitem(last=False)
            self._transactions.update({k: v for k, v in said.items() if k in self._transactions})
        self._noted = self.version()
        if app_id not in self._transactions:
            self._transactions[app_id] = super().transaction_version(app_id)
        return self._transactions[app_id]

    def take_ids(self) -> dict[int, frozenset[str]]:
        """The application ids of commits that were read since the last call, by version; the last hundred."""
        taken: dict[int, frozenset[str]] = {}
        while self._ids:
            version, ids = self._ids.popitem()
            taken[version] = ids
        return taken

    def take_own(self, before: int, versions: Mapping[str, int]) -> None:
        """The one commit between the version ``before`` and the handle's is the caller's own, and it set ``versions``.

        Nothing is taken where there are other commits that were not read yet: the next question reads them all."""
        if self._noted == before == self.version() - 1:
            self._transactions.update(versions)
            self._noted = self.version()

    def commit_of(self, version: int) -> bytes:
        """The commit, by names and moments like no other; empty where there is none any more. Raises OSError."""
        try:
            commit = self._location.read(f"_delta_log/{version:020d}.json")
        except FileNotFoundError:
            commit = b""
        self._last_read = version, commit
        return commit


def _transactions_of(commit: bytes) -> dict[str, int]:
    actions = [json.loads(line) for line in commit.splitlines() if line.startswith(b'{"txn"')]
    return {action["txn"]["appId"]: int(action["txn"]["version"]) for action in actions}
