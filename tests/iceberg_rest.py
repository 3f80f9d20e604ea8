"""A server of Iceberg's REST catalog over HTTP, for tests: the spec's endpoints over pyiceberg's own SQL catalog.

Requirements and updates are checked and applied by pyiceberg, so what is tried is our way through its REST client, and
no product's server. No views, no renames, no credentials.

Where it is told to offer ``transactions/commit``, all tables of a request are changed in one transaction of the
database.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, Table
from sqlalchemy import update
from sqlalchemy.orm import Session
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from xidstream.pipeline.iceberg.commit_together import CommitTransactionRequest

_STATUS: Final[dict[type[Exception], int]] = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    TableAlreadyExistsError: 409,
}
BEHIND: Final = "behind"
"""The name of the SQL catalog, for those who look into its file."""
_NAMESPACES: Final = "/v1/namespaces"
_TABLES: Final = f"{_NAMESPACES}/<namespace>/tables"
_PATHS: Final = {
    "/v1/namespaces": "/v1/{prefix}/namespaces",
    "<namespace>": "{namespace}",
    "<name>": "{table}",
}
_TRANSACTION: Final = "/v1/transactions/commit"
_SEPARATOR: Final = "\x1f"
"""Between the levels of a namespace in a path."""


class IcebergRestServer:
    """At ``uri`` until ``stop``. ``together``: it offers to commit several tables at once, and says in its
    configuration what it offers; else it says nothing. ``n_to_lose``: so many commits are done and answered by 500.
    ``refusals``: the statuses that the next commits of several tables get instead, and ``answers_after`` those that
    they get when they are done. ``takes_only``: so many tables of such a commit are changed, and the rest refused.
    ``before`` is called before such a commit is looked at, ``after`` when it is done, and ``changed`` after each
    table's change, in the same request or not."""

    def __init__(self, folder: Path, *, together: bool = False) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        warehouse = folder / "warehouse"
        warehouse.mkdir()
        self.file = folder / "rest.db"
        self.catalog = SqlCatalog(BEHIND, uri=f"sqlite:///{self.file}", warehouse=f"file://{warehouse}")
        self.n_to_lose = 0
        self.n_commits = 0
        self.n_transactions = 0
        self.refusals: list[int] = []
        self.answers_after: list[int] = []
        self.takes_only: int | None = None
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.changed: Callable[[], object] = lambda: None
        self._one_at_a_time = threading.Lock()
        calls: dict[tuple[str, str], Callable[..., Response]] = {
            ("GET", "/v1/config"): lambda request: _json(config),
            ("GET", _NAMESPACES): self._namespaces,
            ("POST", _NAMESPACES): self._create_namespace,
            ("GET", _TABLES): self._tables,
            ("POST", _TABLES): self._create_table,
            ("GET", f"{_TABLES}/<name>"): lambda request, namespace, name: self._load(namespace, name),
            ("HEAD", f"{_TABLES}/<name>"): self._exists,
            ("POST", f"{_TABLES}/<name>"): self._commit,
            ("DELETE", f"{_TABLES}/<name>"): self._drop,
        }
        config: dict[str, Any] = {"defaults": {}, "overrides": {}}
        if together:
            config["endpoints"] = [f"{method} {_of_spec(path)}" for method, path in calls]
            config["endpoints"].append("POST /v1/{prefix}/transactions/commit")
            calls["POST", _TRANSACTION] = self._commit_together
        self._paths = Map(
            [Rule(path, methods=[method], endpoint=call) for (method, path), call in calls.items()]
        )
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.catalog.close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            call, arguments = self._paths.bind_to_environ(environ).match()
            with self._one_at_a_time:
                answer = call(Request(environ), **arguments)
        except HTTPException as error:
            answer = _error(error.code or 500, error)
        except tuple(_STATUS) as error:
            answer = _error(next(code for kind, code in _STATUS.items() if isinstance(error, kind)), error)
        sent: Iterable[bytes] = answer(environ, start_response)
        return sent

    def _namespaces(self, request: Request) -> Response:
        return _json({"namespaces": [list(each) for each in self.catalog.list_namespaces()]})

    def _create_namespace(self, request: Request) -> Response:
        asked = request.get_json()
        self.catalog.create_namespace(tuple(asked["namespace"]), asked.get("properties", {}))
        return _json({"namespace": asked["namespace"], "properties": asked.get("properties", {})})

    def _tables(self, request: Request, namespace: str) -> Response:
        found = self.catalog.list_tables(tuple(namespace.split(_SEPARATOR)))
        return _json({"identifiers": [{"namespace": list(each[:-1]), "name": each[-1]} for each in found]})

    def _create_table(self, request: Request, namespace: str) -> Response:
        left_out = {"location": None, "partition-spec": None, "write-order": None}
        asked = CreateTableRequest.model_validate({**left_out, **request.get_json()})
        assert not asked.stage_create
        table = self.catalog.create_table(
            (*namespace.split(_SEPARATOR), asked.name),
            asked.table_schema,
            asked.location,
            properties=asked.properties,
        )
        return _table(table)

    def _load(self, namespace: str, name: str) -> Response:
        return _table(self.catalog.load_table((*namespace.split(_SEPARATOR), name)))

    def _exists(self, request: Request, namespace: str, name: str) -> Response:
        return Response(
            status=204 if self.catalog.table_exists((*namespace.split(_SEPARATOR), name)) else 404
        )

    def _commit(self, request: Request, namespace: str, name: str) -> Response:
        asked = CommitTableRequest.model_validate_json(request.get_data())
        table = self.catalog.load_table((*namespace.split(_SEPARATOR), name))
        done = self.catalog.commit_table(table, asked.requirements, asked.updates)
        self.n_commits += 1
        self.changed()
        if self.n_to_lose:
            self.n_to_lose -= 1
            return _error(500, RuntimeError("the answer is lost"))
        return Response(done.model_dump_json(), content_type="application/json")

    def _commit_together(self, request: Request) -> Response:
        if self.refusals:
            return _error(self.refusals.pop(0), RuntimeError("not so"))
        self.before()
        changes = CommitTransactionRequest.model_validate_json(request.get_data()).table_changes
        staged = []
        for each in changes:
            name = (*each.identifier.namespace.root, each.identifier.name)
            table = self.catalog.load_table(name)
            found = self.catalog._update_and_stage_table(table, name, each.requirements, each.updates)
            self.catalog._write_metadata(found.metadata, found.io, found.metadata_location)
            staged.append((each.identifier, table.metadata_location, found.metadata_location))
        with Session(self.catalog.engine) as session:
            for identifier, before, after in staged[: self.takes_only]:
                change = (
                    update(IcebergTables)
                    .where(
                        IcebergTables.table_namespace == ".".join(identifier.namespace.root),
                        IcebergTables.table_name == identifier.name,
                        IcebergTables.metadata_location == before,
                    )
                    .values(metadata_location=after, previous_metadata_location=before)
                )
                if session.execute(change).rowcount != 1:  # type: ignore[attr-defined]
                    raise CommitFailedException(f"{identifier.name} was changed")
                self.changed()
            session.commit()
        self.after()
        if self.takes_only is not None:
            return _error(409, RuntimeError("not so"))
        self.n_transactions += 1
        if self.answers_after:
            return _error(self.answers_after.pop(0), RuntimeError("somebody else was first"))
        if self.n_to_lose:
            self.n_to_lose -= 1
            return _error(500, RuntimeError("the answer is lost"))
        return Response(status=204)

    def _drop(self, request: Request, namespace: str, name: str) -> Response:
        self.catalog.drop_table((*namespace.split(_SEPARATOR), name))
        return Response(status=204)


def _of_spec(path: str) -> str:
    for ours, spec in _PATHS.items():
        path = path.replace(ours, spec)
    return path


def _table(table: Table) -> Response:
    found = TableResponse.model_validate(
        {"metadata": table.metadata, "metadata-location": table.metadata_location}
    )
    return Response(found.model_dump_json(), content_type="application/json")


def _json(found: dict[str, Any]) -> Response:
    return Response(json.dumps(found), content_type="application/json")


def _error(code: int, error: Exception) -> Response:
    answer = _json({"error": {"message": str(error), "type": type(error).__name__, "code": code}})
    answer.status_code = code
    return answer
