"""AWS Glue as a catalog of base tables: entries as Athena, Trino and Spark want them of a Delta table.

| who | what it looks at |
| --- | --- |
| Athena | parameter ``table_type`` = ``DELTA``, and the location. It reads the columns from the Delta log |
| Trino | parameter ``spark.sql.sources.provider`` = ``delta``, and ``path`` among the SerDe's parameters |
| Spark with Delta | the same two |
| Glue's federation | classes for input, output and SerDe, else it refuses the whole database. Parquet's will do |

Sources: Athena's user guide ("Query Linux Foundation Delta Lake tables"), ``HiveMetastoreBackedDeltaLakeMetastore`` of
Trino, and apache/incubator-xtable#940. Of the real services none was tried, only moto's Glue.

The database must be there: whose it is, and who may read it, is for its owner to say. boto3 finds credentials and the
region as always, and in deltalake's options where those name them. Those options' endpoint is the store's and not
Glue's, so it is not taken; ``AWS_ENDPOINT_URL_GLUE`` is.

Before an entry is changed or removed it is read once more, because the last listing may be ten minutes old: what others
have put in its place stays, and so do parameters that they have added to it. What is left
between that look and the change is some milliseconds. ``VersionId`` of ``UpdateTable`` may close it: it is not sent,
because it could not be tried on the service, and ``DeleteTable`` has nothing of the kind.

boto3 is optional (``pip install xidstream[s3]``). A call is given up after half a minute at most, because it is made
beside refreshes.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Final

from xidstream.pipeline.errors import (
    ConfigError,
    PreconditionMissing,
    StorageFault,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import PREFIX
from xidstream.pipeline.mirror.catalog import SLOT, CatalogColumn, CatalogTable
from xidstream.pipeline.settings.catalog_names import CatalogName

INSTALL: Final = "pip install 'xidstream[s3]'"
_MOST_TEXT: Final = 255
"""Characters of a comment that Glue takes for a column; a table's may have 2048."""
_MOST_DESCRIPTION: Final = 2048
_PARQUET: Final = "org.apache.hadoop.hive.ql.io.parquet"
_DELTA: Final = {
    "EXTERNAL": "TRUE",
    "classification": "delta",
    "table_type": "DELTA",
    "spark.sql.sources.provider": "delta",
}
_IS_MISSING: Final = "EntityNotFoundException"
_UNFIT: Final = frozenset({"ValidationException", "InvalidInputException", "ParamValidationError"})
"""What is wrong with one entry, such as a line's end in a name. Others may fit."""


def check_usable(name: CatalogName, root: Location) -> None:
    """Raises ConfigError where boto3 is not installed, or ``root`` is not in S3."""
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"mirror_catalog: {name} needs boto3, which is not installed", remedy=INSTALL)
    if not root.uri.startswith(("s3://", "s3a://")):
        raise ConfigError(
            f"mirror_catalog: {name} is for tables in S3, and these are in {root.uri}",
            remedy="leave mirror_catalog out, or write the change log to s3://…",
        )


class GlueCatalog:
    """Raises ConfigError as ``check_usable``."""

    def __init__(self, name: CatalogName, root: Location) -> None:
        check_usable(name, root)
        import boto3
        from botocore.config import Config

        given = {
            key.lower().removeprefix("aws_"): value for key, value in (root.storage_options or {}).items()
        }
        self._name = name
        self._client: Any = boto3.session.Session().client(
            "glue",
            region_name=given.get("region") or os.environ.get("AWS_REGION"),
            aws_access_key_id=given.get("access_key_id"),
            aws_secret_access_key=given.get("secret_access_key"),
            aws_session_token=given.get("session_token"),
            config=Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2}),
        )

    def __str__(self) -> str:
        return str(self._name)

    def uri_of(self, table: Location) -> str:
        return "s3://" + table.uri.partition("://")[2]

    def tables(self) -> list[CatalogTable]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self._client.get_paginator("get_tables").paginate(DatabaseName=self._name.database)
            return [_entry(table) for page in pages for table in page["TableList"]]
        except (BotoCoreError, ClientError) as error:
            raise self._fault(error, "list its tables") from error

    def put(self, table: CatalogTable, *, instead_of: CatalogTable | None) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        wanted = _input(table)
        request = {"DatabaseName": self._name.database, "TableInput": wanted}
        try:
            found = None if instead_of is None else self._found(instead_of)
            if found is None:
                self._client.create_table(**request)
                return
            others = {
                name: value
                for name, value in (found.get("Parameters") or {}).items()
                if not name.startswith(PREFIX)
            }
            wanted["Parameters"] = {**others, **wanted["Parameters"]}
            # Without a version of the entry for each change of columns: Glue keeps and bills those.
            self._client.update_table(**request, SkipArchive=True)
        except (BotoCoreError, ClientError) as error:
            if _code(error) in _UNFIT:
                raise Unsupported(f"{self} takes no such table: {_code(error)}") from error
            raise self._fault(error, f"register {table.name}") from error

    def remove(self, table: CatalogTable) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if self._found(table) is not None:
                self._client.delete_table(DatabaseName=self._name.database, Name=table.name)
        except ClientError as error:
            if _code(error) != _IS_MISSING:
                raise self._fault(error, f"remove {table.name}") from error
        except BotoCoreError as error:
            raise self._fault(error, f"remove {table.name}") from error

    def _found(self, expected: CatalogTable) -> dict[str, Any] | None:
        """The entry as it is now; None where it is gone. Raises StorageFault where it is another's, and what boto3
        raises."""
        from botocore.exceptions import ClientError

        try:
            answer = self._client.get_table(DatabaseName=self._name.database, Name=expected.name)
        except ClientError as error:
            if _code(error) == _IS_MISSING:
                return None
            raise
        found: dict[str, Any] = answer["Table"]
        entry = _entry(found)
        if entry.uri != expected.uri or entry.properties.get(SLOT) != expected.properties.get(SLOT):
            raise StorageFault(
                f"{self}: {expected.name} is another's entry by now, and is left as it is",
                remedy="rename one of the two: the base table is refused while the other has its name",
            )
        return found

    def _fault(self, error: Exception, doing: str) -> XidstreamError:
        code = _code(error)
        if code == _IS_MISSING:
            return PreconditionMissing(
                f"{self} cannot {doing}: there is no such database",
                remedy=f"make it once: aws glue create-database --database-input Name={self._name.database}",
            )
        return StorageFault(
            f"{self} cannot {doing}: {code}", remedy="see that Glue can be reached and the role may do that"
        )


def _code(error: Exception) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code") or type(error).__name__)


def _input(table: CatalogTable) -> dict[str, Any]:
    columns = [{"Name": c.name, "Type": c.type, "Comment": c.comment[:_MOST_TEXT]} for c in table.columns]
    return {
        "Name": table.name,
        "Description": table.comment[:_MOST_DESCRIPTION],
        "TableType": "EXTERNAL_TABLE",
        "Parameters": {**_DELTA, **table.properties},
        "StorageDescriptor": {
            "Columns": columns,
            "Location": table.uri,
            "InputFormat": f"{_PARQUET}.MapredParquetInputFormat",
            "OutputFormat": f"{_PARQUET}.MapredParquetOutputFormat",
            "SerdeInfo": {
                "SerializationLibrary": f"{_PARQUET}.serde.ParquetHiveSerDe",
                "Parameters": {"path": table.uri, "serialization.format": "1"},
            },
        },
    }


def _entry(found: dict[str, Any]) -> CatalogTable:
    stored = found.get("StorageDescriptor") or {}
    columns = tuple(
        CatalogColumn(column["Name"], column.get("Type", ""), column.get("Comment", ""))
        for column in stored.get("Columns", ())
    )
    properties = {
        name: value for name, value in (found.get("Parameters") or {}).items() if name.startswith(PREFIX)
    }
    uri = str(stored.get("Location") or "").rstrip("/")
    return CatalogTable(found["Name"], uri, found.get("Description", ""), columns, properties)
