"""A segment in Azure Blob Storage copied into a table in the same storage account, with another end.

A blob is put together from blocks. One is taken from the segment on the server's side (Put Block From URL), the filled
end is sent as the last one (Put Block), and Put Block List names them all: the blob appears then, whole. Three writes a
file. Blocks that no list names are in no listing, and the store drops them after a week.

azure-storage-blob does it, an optional dependency with azure-identity (``pip install xidstream[azure]``). What is
installed anyway copies whole objects. Without it, across two accounts, and where the account refuses, Spark writes the
file. Signing the requests by hand was rejected: an account's keys are one of four kinds of credentials.

Credentials are the sink's, which deltalake takes from its options and from ``AZURE_…`` in the environment: an account's
key, a shared access signature, a client's secret, else what azure-identity finds (a managed identity, a workload's,
the CLI's), as pyarrow does for the storage. They must be able to read the storage. The store reads the segment for us,
so it wants to be told on whose behalf: a signature for this blob, made by the key, the same signature, or the same
token.
"""

from __future__ import annotations

import base64
import datetime
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.store_copies import CopyRefused, StoreCopies

LARGEST_BLOCK_BYTES: Final = 100 << 20
"""The store may take blocks of 4,000 MiB, by versions of its interface; this much it takes in all of them."""
_SCHEMES: Final = ("abfs", "abfss")
_CLOUD: Final = "core.windows.net"
_TOKEN_SCOPE: Final = "https://storage.azure.com/.default"
_SIGNED_FOR: Final = datetime.timedelta(hours=1)
_REFUSED: Final = frozenset({400, 401, 403, 405, 409, 501})
_MISSING: Final = 404
_SHORT: Final = 416
_KEYS: Final = ("account_key", "access_key", "master_key")
_SIGNATURES: Final = ("sas_token", "sas_key")
_TENANTS: Final = ("tenant_id", "authority_id")


@dataclass(frozen=True)
class _BlobFolder:
    """``endpoint``: the URL of the account. ``prefix``: inside the container, without slashes at its ends."""

    endpoint: str
    account: str
    container: str
    prefix: str


class AzureCopies(StoreCopies):
    """Thread-safe, as the library's clients are."""

    @staticmethod
    def can_copy(storage_uri: str, root: Location) -> bool:
        if not AzureCopies.may_copy(storage_uri, root):
            return False
        storage, table = _storage_folder(storage_uri), _table_folder(root)
        return storage is not None and table is not None and storage.endpoint == table.endpoint

    @staticmethod
    def may_copy(storage_uri: str, root: Location) -> bool:
        if urlsplit(storage_uri).scheme.lower() not in _SCHEMES or urlsplit(root.uri).scheme not in _SCHEMES:
            return False
        return all(
            importlib.util.find_spec(name) is not None
            for name in ("azure", "azure.storage", "azure.storage.blob", "azure.identity")
        )

    def __init__(self, storage_uri: str, root: Location) -> None:
        from azure.storage.blob import BlobServiceClient, ExponentialRetry

        storage, table = _storage_folder(storage_uri), _table_folder(root)
        assert storage is not None and table is not None
        self._storage, self._root = storage, root
        self._reading = _Reading(table.account, _options(root))
        self._client: Any = BlobServiceClient(
            table.endpoint,
            credential=self._reading.credential,
            # The library's own first pause of 15 s is longer than a batch may take.
            retry_policy=ExponentialRetry(initial_backoff=1, increment_base=2, random_jitter_range=1),
        )

    def read(self, name: str, start: int) -> bytes:
        source = self._source(name)
        with self._telling(name, source):
            return bytes(source.download_blob(offset=start).readall())

    def put(self, name: str, content: bytes, target: Location) -> None:
        with self._telling(name, self._source(name)):
            self._blob(target).upload_blob(content, overwrite=True)

    def copy(self, name: str, start: int, tail: bytes, target: Location) -> None:
        source = self._source(name)
        with self._telling(name, source):
            self._put_together(source, start, tail, self._blob(target))

    def _source(self, name: str) -> Any:
        return self._client.get_blob_client(
            self._storage.container, f"{self._storage.prefix}/{name}".lstrip("/")
        )

    def _blob(self, target: Location) -> Any:
        folder = _table_folder(target)
        assert folder is not None
        return self._client.get_blob_client(folder.container, folder.prefix)

    @contextmanager
    def _telling(self, name: str, source: Any) -> Iterator[None]:
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

        try:
            yield
        except ClientAuthenticationError as error:
            raise CopyRefused(f"{_code(error)}: no credentials that Azure takes") from error
        except HttpResponseError as error:
            if error.status_code == _MISSING and not self._is_there(source):
                raise SegmentCorrupt(f"segment {name!r} is missing") from error
            if error.status_code == _SHORT:
                raise SegmentCorrupt(f"segment {name!r} is shorter than it was") from error
            if error.status_code in _REFUSED or error.status_code == _MISSING:
                raise CopyRefused(_code(error)) from error
            raise StorageFault(f"segment {name!r} cannot be copied: {_code(error)}") from error
        except AzureError as error:
            # Without its cause: urllib3's error has the request's path, with a signature in its query.
            raise StorageFault(f"segment {name!r} cannot be copied: {type(error).__name__}") from None

    def _put_together(self, source: Any, start: int, tail: bytes, blob: Any) -> None:
        allowed = self._reading.of(source)
        names = [_block_name(number) for number in range(-(-start // LARGEST_BLOCK_BYTES) + 1)]
        for number, name in enumerate(names[:-1]):
            first = number * LARGEST_BLOCK_BYTES
            length = min(LARGEST_BLOCK_BYTES, start - first)
            blob.stage_block_from_url(
                name, allowed.url, first, length, source_authorization=allowed.authorization
            )
        blob.stage_block(names[-1], tail)
        blob.commit_block_list(names)

    def _is_there(self, source: Any) -> bool:
        """Asked after a failure alone. What the store does not let us see is there, for all that is known."""
        from azure.core.exceptions import AzureError

        try:
            return bool(source.exists())
        except AzureError:
            return True


@dataclass(frozen=True)
class _Allowed:
    """How a request that the store makes for us is allowed to read a blob. Both are secret, so no ``repr`` has them."""

    url: str = field(repr=False)
    authorization: str | None = field(default=None, repr=False)


class _Reading:
    """``credential``: as the library's clients take it; of one of four kinds."""

    def __init__(self, account: str, options: Mapping[str, str]) -> None:
        from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
        from azure.identity import ClientSecretCredential, DefaultAzureCredential

        self._account = account
        self._key = _first(options, _KEYS)
        self._signature = (_first(options, _SIGNATURES) or "").removeprefix("?")
        client, secret, tenant = (
            options.get("client_id"),
            options.get("client_secret"),
            _first(options, _TENANTS),
        )
        self.credential: Any
        if self._key is not None:
            self.credential = AzureNamedKeyCredential(account, self._key)
        elif self._signature:
            self.credential = AzureSasCredential(self._signature)
        elif client and secret and tenant:
            self.credential = ClientSecretCredential(tenant, client, secret)
        else:
            self.credential = DefaultAzureCredential(
                managed_identity_client_id=client, workload_identity_client_id=client
            )

    def of(self, source: Any) -> _Allowed:
        """Raises what the library raises where there is no token."""
        from azure.storage.blob import generate_blob_sas

        if self._key is not None:
            signature = generate_blob_sas(
                self._account,
                source.container_name,
                source.blob_name,
                account_key=self._key,
                permission="r",
                expiry=datetime.datetime.now(datetime.timezone.utc) + _SIGNED_FOR,
            )
            return _Allowed(f"{source.url}?{signature}")
        if self._signature:
            return _Allowed(f"{source.url}?{self._signature}")
        return _Allowed(source.url, f"Bearer {self.credential.get_token(_TOKEN_SCOPE).token}")


def _block_name(number: int) -> str:
    """All of one length, as the store demands."""
    return base64.b64encode(f"{number:08d}".encode()).decode()


def _code(error: Any) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or getattr(error, "status_code", None) or type(error).__name__)


def _first(options: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((options[name] for name in names if options.get(name)), None)


def _options(root: Location) -> dict[str, str]:
    """deltalake's options over those of the environment, without ``azure_`` and ``storage_`` before their names."""
    of_environment = {name: value for name, value in os.environ.items() if name.upper().startswith("AZURE_")}
    return {
        name.lower().removeprefix("azure_").removeprefix("storage_"): value
        for given in (of_environment, root.storage_options or {})
        for name, value in given.items()
    }


def _table_folder(root: Location) -> _BlobFolder | None:
    """Where deltalake finds it; None for what is not Azure's Blob Storage, and where the account is not told."""
    parts, options = urlsplit(root.uri), _options(root)
    account, container = options.get("account_name"), parts.netloc
    if "@" in parts.netloc:
        container, _, host = parts.netloc.rpartition("@")
        named, _, domain = host.partition(".")
        if domain not in (f"dfs.{_CLOUD}", f"blob.{_CLOUD}"):
            return None
        account = named
    if not account or not container:
        return None
    endpoint = options.get("endpoint") or f"https://{account}.blob.{_CLOUD}"
    return _BlobFolder(_normal(endpoint), account, container, unquote(parts.path).strip("/"))


def _storage_folder(storage_uri: str) -> _BlobFolder | None:
    """Where pyarrow finds it, by the four forms of its URIs; None where the account is not told."""
    parts = urlsplit(storage_uri)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    user = unquote(parts.username or "")
    host, path = parts.hostname or "", unquote(parts.path).strip("/")
    scheme = "http" if query.get("enable_tls", "true").lower() in ("false", "0") else "https"
    for kind in ("blob", "dfs"):
        if host.endswith(f".{kind}.{_CLOUD}"):
            account = host.partition(".")[0]
            if kind == "blob":
                user, _, path = path.partition("/")
            return (
                _BlobFolder(_normal(f"https://{account}.blob.{_CLOUD}"), account, user, path)
                if user
                else None
            )
    if not user:
        return None
    authority = query.get("blob_storage_authority", f".blob.{_CLOUD}")
    container = host
    if "." in host or parts.port is not None:
        authority = parts.netloc.rpartition("@")[2]
        container, _, path = path.partition("/")
    endpoint = (
        f"{scheme}://{user}{authority}" if authority.startswith(".") else f"{scheme}://{authority}/{user}"
    )
    return _BlobFolder(_normal(endpoint), user, container, path) if container else None


def _normal(endpoint: str) -> str:
    return endpoint.rstrip("/").lower()
