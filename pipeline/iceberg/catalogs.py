"""Which catalog and namespace the setting ``iceberg:CATALOG/namespace`` names, and the catalog as an object.

CATALOG is one of two things:

- *A folder*, which begins with ``/``, ``./``, ``../``, ``~`` or ``file:``. It is the warehouse, and the catalog is
  SQLite, in the file ``catalog.db`` there. Nothing else has to be set up. Its name, under which other programs find the
  tables in it, is ``FOLDER_CATALOG``.
- *The name of a catalog* that pyiceberg's own configuration has (``.pyiceberg.yaml``, or ``PYICEBERG_CATALOG__NAME__…``
  in the environment). Whatever is secret about it stays there: the setting, which is shown and logged, has none of it.

The part after the last slash is the namespace. Dots divide its levels, as pyiceberg has it.

Who only looks at a catalog makes nothing: no file of SQLite, and no table in a database.

Rejected: a URI of a database in the setting (it holds a password as a rule), and a setting of its own for the
warehouse (a catalog knows where its tables are).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import ConfigError, Unsupported
from xidstream.pipeline.log_tables.locations import REMOTE_SCHEMES, Location
from xidstream.pipeline.settings.credentials import is_secret_name
from xidstream.pipeline.settings.file_modes import make_folders
from xidstream.pipeline.settings.local_paths import absolute, is_path
from xidstream.pipeline.settings.sink_kinds import ICEBERG

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

FOLDER_CATALOG: Final = "xidstream"
CATALOG_FILE: Final = "catalog.db"
_WAITS_S: Final = 30
"""For another process that commits: SQLite lets one write at a time."""
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DURABLE_IO: Final = "xidstream.pipeline.iceberg.durable_io.DurableFileIO"
INSTALL: Final = "pip install 'xidstream[iceberg]'"


@dataclass(frozen=True)
class IcebergAddress:
    """``catalog``: a name, or the absolute path of a folder. ``namespace``: with dots between its levels."""

    catalog: str
    namespace: str

    @classmethod
    def parse(cls, argument: str) -> IcebergAddress:
        """From what the setting has after ``iceberg:``. Raises ConfigError, also where pyiceberg is not installed."""
        if importlib.util.find_spec("pyiceberg") is None:
            raise ConfigError("an Iceberg sink needs pyiceberg, which is not installed", remedy=INSTALL)
        catalog, slash, namespace = argument.rpartition("/")
        if not (slash and catalog) or not _NAMESPACE.fullmatch(namespace):
            raise ConfigError(
                f"sink iceberg: {argument!r} names no catalog and namespace",
                remedy=f"give {ICEBERG.form}: a folder or a catalog that pyiceberg knows, and behind the last slash a "
                "namespace of letters, digits, - and _, with dots between its levels",
            )
        if ICEBERG.is_folder_or_uri(catalog):
            scheme = catalog.partition(":")[0].lower()
            if scheme in REMOTE_SCHEMES:
                raise ConfigError(
                    f"sink iceberg: a catalog of its own can only be in a folder, not in {scheme}:",
                    remedy="configure a catalog with this warehouse in .pyiceberg.yaml, and give its name",
                )
            folder = Location.parse(catalog).uri
            if {"?", "#"} & set(folder):
                raise ConfigError(
                    "sink iceberg: the folder of a catalog cannot hold ? or #, which end the name of a database",
                    remedy="choose another name for the folder",
                )
            return cls(folder, namespace)
        if not _NAME.fullmatch(catalog):
            raise ConfigError(
                f"sink iceberg: {catalog!r} is neither a folder nor the name of a catalog",
                remedy="a folder begins with /, ./ or ~, and a name has letters, digits, - and _",
            )
        return cls(catalog, namespace)

    @property
    def is_folder(self) -> bool:
        return self.catalog.startswith("/")

    @property
    def argument(self) -> str:
        return f"{self.catalog}/{self.namespace}"

    def warehouse(self) -> str | None:
        """Where the catalog puts tables, as far as its configuration says so. Raises ConfigError."""
        return self.catalog if self.is_folder else configuration(self.catalog).get("warehouse")

    def root(self) -> Location | None:
        """Where the catalog puts tables, as far as its configuration says so. Raises as ``location_of``."""
        warehouse = self.warehouse()
        if warehouse is None or "/" not in warehouse:
            return None  # a catalog of REST may have a name for it
        properties = {} if self.is_folder else configuration(self.catalog)
        return location_of(warehouse, properties, f"the warehouse of iceberg:{self.argument}")

    def open(self, *, makes: bool) -> Catalog | None:
        """The catalog. ``makes``: make what it needs where that is not there; None where it would have to be made.

        Raises ConfigError, and what its driver raises."""
        if not self.is_folder:
            found = configuration(self.catalog)
            kept = {} if makes else {"init_catalog_tables": "false"}
            return _load(self.catalog, {**found, **_ours(found), **kept})
        file = os.path.join(self.catalog, CATALOG_FILE)
        if not makes and not os.path.exists(file):
            return None
        make_folders(self.catalog)
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{file}?timeout={_WAITS_S}",
            "warehouse": f"file://{self.catalog}",
        }
        return _load(FOLDER_CATALOG, {**_ours(properties), **properties})


def location_of(uri: str, properties: Mapping[str, str], what: str) -> Location:
    """A place of pyiceberg's, as ``log_tables`` takes it. ``properties``: of the file system there.

    Files are written by Ray's actors and Spark's tasks, too, and no secret travels to these. So each node has its own
    credentials, and the place alone is taken from ``properties``. Raises Unsupported for a store that was never tried,
    for a path with a %, and for credentials among the properties; ConfigError."""
    scheme = "file" if is_path(uri) else uri.partition(":")[0].lower()
    if scheme == "file":
        return Location.parse(uri)
    if scheme not in ("s3", "s3a"):
        raise Unsupported(
            f"{what} is in {scheme}: so far an Iceberg sink writes tables in folders and in S3 alone",
            remedy="give the catalog another warehouse, or the sink delta:URI",
        )
    if "%" in uri:
        # deltalake, which writes the files, decodes it, and pyiceberg, which names them in the table, does not.
        raise Unsupported(
            f"{what} has a % in its path: its files would be where no reader of Iceberg looks",
            remedy="give the catalog a warehouse without %",
        )
    if secret := next((name for name in properties if name.startswith("s3.") and is_secret_name(name)), None):
        raise Unsupported(
            f"{what}: the catalog's configuration has {secret}, and files are written by Ray's actors and Spark's "
            "tasks, to which no credentials are sent",
            remedy="leave it out there; each node finds its own in the environment (AWS_ACCESS_KEY_ID, …), in the "
            "provider's credentials file, or by the role of the machine (docs/security.md)",
        )
    options: dict[str, str] = {}
    if endpoint := properties.get("s3.endpoint"):
        options |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": str(endpoint.startswith("http:")).lower()}
    if region := properties.get("s3.region") or properties.get("client.region"):
        options["AWS_REGION"] = region
    return Location.parse(uri, options or None)


def bare(uri: str) -> str:
    """A place without its scheme: programs write ``file:/x``, ``file:///x`` and ``/x``, ``s3:`` and ``s3a:``."""
    scheme, colon, path = uri.partition(":")
    if not colon or "/" in scheme:
        return uri
    path = path.lstrip("/")
    return f"/{path}" if scheme == "file" else path


def configuration(name: str) -> dict[str, str]:
    """What pyiceberg's configuration says of a catalog; it may hold secrets. Raises ConfigError."""
    try:
        from pyiceberg.utils.config import Config

        found = Config().get_catalog_config(name)
    except ImportError as error:
        raise _not_installed(error) from error
    except ValueError:
        raise ConfigError("pyiceberg's configuration of its catalogs is not readable") from None
    if found is None:
        raise ConfigError(
            f"sink iceberg: pyiceberg's configuration has no catalog {name!r}",
            remedy=f"describe it in .pyiceberg.yaml or by PYICEBERG_CATALOG__{name.upper()}__URI, where the Spark "
            f"driver runs; if you mean the folder, write {absolute(name)}",
        )
    return {key: str(value) for key, value in found.items()}


def _ours(properties: dict[str, str]) -> dict[str, str]:
    """What the configuration leaves open. Metadata on a local disk must be on disk before the catalog names it. And a
    connection that has waited for a day may be gone: a database is asked first."""
    ours = {"py-io-impl": _DURABLE_IO}
    if properties.get("type") == "sql":
        ours["pool_pre_ping"] = "true"
    return {name: value for name, value in ours.items() if name not in properties}


def _load(name: str, properties: dict[str, str]) -> Catalog:
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NotInstalledError
    except ImportError as error:
        raise _not_installed(error) from error
    try:
        return load_catalog(name, **properties)
    except (ImportError, NotInstalledError) as error:
        raise _not_installed(error) from error
    except ValueError:
        # Its message lists the properties, and with them secrets.
        raise ConfigError(
            f"sink iceberg: the configuration of catalog {name!r} makes no catalog",
            remedy="look at its type and its uri: they are pyiceberg's own settings",
        ) from None


def _not_installed(error: Exception) -> ConfigError:
    module = getattr(error, "name", None) or "a driver of the catalog"
    return ConfigError(f"an Iceberg sink needs {module}, which is not installed", remedy=INSTALL)
