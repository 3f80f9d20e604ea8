"""Commits of several Iceberg tables in one request, where the catalog takes such: all of them, or none.

The endpoint is REST's ``POST /v1/{prefix}/transactions/commit``. A server that has it names it among the ``endpoints``
of its configuration. One that names no endpoints is asked for what pyiceberg takes such a server to have, and this is
not among it (Java's client takes it to be): a wrong guess would end a run. pyiceberg (0.12) sends requests of one table
alone, so its session, its models and its classes of errors are used here, and its addresses.

What one table's commit promises holds for all of them together, by the same code (``IcebergTableWriter.begin``,
``stage``, ``take``): each table requires that its main branch is still at the snapshot which its watermarks were read
from. So where somebody else was first in one table, the catalog refuses the request (409), and nothing is visible of
any. That is looked up: a proxy that sends a request again is refused because the first one was done. Then all manifests
are removed, all tables are read again, and where everybody's change was harmless, all is sent again. Where the outcome
is not known (5xx, a lost connection) nothing is removed, and the run reads from the watermarks what has happened.

Small files are merged after it, in commits of one table each: these bring no row.

The answer has no content: what the catalog made of it is read again, a few tables at a time. Nobody waits for that who
reads the tables.

Whoever runs the catalog may have good reason not to use it: a server whose commit is one request and several steps, or
that takes no large requests. So the property ``SETTING`` of the catalog turns it off.

Rejected: requests of some tables each, where a batch has many (then it is not one step); the same over a SQL catalog,
by one transaction of the database, through functions that pyiceberg keeps to itself and no other program's catalog has.

``IcebergTables.together`` gives it to the sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

from pydantic import Field
from pyiceberg.catalog.rest import API_PREFIX, Endpoint, HttpMethod, RestCatalog
from pyiceberg.catalog.rest.response import _handle_non_200_response
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.table import CommitTableRequest, TableIdentifier
from pyiceberg.typedef import IcebergBaseModel
from pyiceberg.utils.properties import property_as_bool
from requests import HTTPError, Response

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.catalog_errors import answering
from xidstream.pipeline.iceberg.iceberg_table import ATTEMPTS, IcebergTableWriter
from xidstream.pipeline.iceberg.staged_commits import StagedCommit
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated, TableCommit, Together

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

SETTING: Final = "xidstream.transactions-commit"
"""A property of the catalog: ``false`` has each table committed by itself."""
_PATH: Final = "transactions/commit"
ENDPOINT: Final = Endpoint(http_method=HttpMethod.POST, path=f"{API_PREFIX}/{_PATH}")
_PARALLEL: Final = 4
"""Tables that are read again at a time."""
_KNOWN: Final = frozenset({401, 403, 404, 409, 419, 429})
"""What a refusal of these kinds means is known for a commit of one table, too."""


class CommitTransactionRequest(IcebergBaseModel):
    """The specification's."""

    table_changes: tuple[CommitTableRequest, ...] = Field(alias="table-changes")


def together_of(catalog: Catalog, root: str) -> Together | None:
    """What commits tables of ``catalog`` in one request. None where it takes none, or is not to be asked to. ``root``:
    the namespace, for people."""
    if not isinstance(catalog, RestCatalog) or ENDPOINT not in catalog._supported_endpoints:
        return None
    if not property_as_bool(catalog.properties, SETTING, True):
        return None
    return _Together(catalog, root)


class _Together:
    """``Together``, over a REST catalog."""

    def __init__(self, catalog: RestCatalog, root: str) -> None:
        self._catalog = catalog
        self._root = root

    def __call__(self, commits: Sequence[TableCommit]) -> None:
        tables = [cast(IcebergTableWriter, each.table) for each in commits]
        moved = [
            table.begin(each.files, each.versions, each.marks)
            for table, each in zip(tables, commits, strict=True)
        ]
        for _ in range(ATTEMPTS):
            staged: list[StagedCommit] = []
            try:
                for table, each, versions in zip(tables, commits, moved, strict=True):
                    staged.append(table.stage(each.files, versions, each.lsn_column))
            except Exception:
                _discard(staged)
                raise
            try:
                self._send(tables, staged)
                break
            except CommitFailedException:
                if self._were_taken(tables, staged):
                    break
                _discard(staged)
                for table, versions in zip(tables, moved, strict=True):
                    table.reload_behind_harmless(versions)
        else:
            raise SnapshotOutdated(self._root)
        reach("iceberg_tables_committed")
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="iceberg-reading") as threads:
            list(threads.map(IcebergTableWriter.take, tables, staged, moved))
        for table, each in zip(tables, commits, strict=True):
            table.merge_behind(each.files, each.lsn_column)

    def _were_taken(self, tables: Sequence[IcebergTableWriter], staged: Sequence[StagedCommit]) -> bool:
        """Whether a request that the catalog has refused was done all the same (``IcebergTableWriter.has``): one that a
        proxy has sent again loses the race against itself. Raises as ``answering`` where only some tables have it, or
        it cannot be found out."""
        with answering(self._root):
            with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="iceberg-reading") as threads:
                found = set(threads.map(IcebergTableWriter.has, tables, staged))
            if len(found) > 1:
                raise CommitStateUnknownException("a commit of several tables was refused, and some have it")
        return True in found

    def _send(self, tables: Sequence[IcebergTableWriter], staged: Sequence[StagedCommit]) -> None:
        """Once, or again after a new token. Raises CommitFailedException where nothing of it was done, and what
        ``requests`` and pyiceberg raise."""
        changes = [
            CommitTableRequest(
                identifier=_identifier(table),
                requirements=each.requirements,
                updates=each.transaction._updates,
            )
            for table, each in zip(tables, staged, strict=True)
        ]
        body = CommitTransactionRequest.model_validate({"table-changes": changes}).model_dump_json().encode()
        with answering(self._root):
            try:
                self._check(self._post(body), len(changes))
            except (AuthorizationExpiredError, UnauthorizedError):
                # As pyiceberg does for each of its own requests: whoever is not let in has done nothing.
                self._catalog._refresh_token()
                self._check(self._post(body), len(changes))

    def _post(self, body: bytes) -> Response:
        return self._catalog._session.post(self._catalog.url(_PATH), data=body)

    def _check(self, answer: Response, n_tables: int) -> None:
        code = answer.status_code
        if (400 <= code < 500 and code not in _KNOWN) or code == HTTPStatus.NOT_IMPLEMENTED:
            raise SinkFailed(
                f"the catalog of {self._root} takes no commit of these {n_tables} tables in one request "
                f"(HTTP {code}), though it says that it takes such",
                remedy=f"set the catalog's property {SETTING} to false, where pyiceberg is configured: then each "
                "table is committed by itself (docs/iceberg.md)",
            )
        try:
            answer.raise_for_status()
        except HTTPError as error:
            unknown = dict.fromkeys((500, 502, 504), CommitStateUnknownException)
            _handle_non_200_response(error, {404: NoSuchTableError, 409: CommitFailedException, **unknown})


def _identifier(table: IcebergTableWriter) -> TableIdentifier:
    *namespace, name = table.loaded.name()
    return TableIdentifier.model_validate({"namespace": namespace, "name": name})


def _discard(staged: Sequence[StagedCommit]) -> None:
    for each in staged:
        each.discard()
