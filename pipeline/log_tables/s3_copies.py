"""A segment in S3 copied into a table in the same store, without its bytes leaving the store, and with another end.

The constants that COMMIT fills in are near the end of the file, in its last kilobytes. So a multipart upload takes all
before them from the segment (UploadPartCopy) and the filled end from us, as its last part. Only a last part may be
smaller than 5 MiB: a segment with less in front of its end is fetched and put, which is two requests in all.

boto3 does it, an optional dependency (``pip install xidstream[s3]``). What is installed anyway cannot: ``pyarrow.fs``
and deltalake copy whole objects. Without it, across two stores, and where the store refuses a copy, Spark writes the
file. The sink's credentials must be able to read the storage.

A process that is killed leaves an unfinished upload in the bucket. It is in no listing, and a lifecycle rule
(AbortIncompleteMultipartUpload) removes it.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.s3_puts import endpoint_of, environment_endpoint, s3_client
from xidstream.pipeline.log_tables.store_copies import CopyRefused, StoreCopies

LARGEST_PART_BYTES: Final = 5 << 30
_SCHEMES: Final = ("s3", "s3a")
_REFUSED: Final = frozenset(
    {"AccessDenied", "403", "NotImplemented", "501", "MethodNotAllowed", "405", "InvalidRequest"}
)
_MISSING: Final = frozenset({"NoSuchKey", "404"})
_SHORT: Final = frozenset({"InvalidRange", "416"})


class S3Copies(StoreCopies):
    """Thread-safe, as boto3's clients are."""

    @staticmethod
    def can_copy(storage_uri: str, root: Location) -> bool:
        is_one_store = _host(_storage_endpoint(storage_uri)) == _host(endpoint_of(_options(root)))
        return S3Copies.may_copy(storage_uri, root) and is_one_store

    @staticmethod
    def may_copy(storage_uri: str, root: Location) -> bool:
        if urlsplit(storage_uri).scheme.lower() != "s3" or urlsplit(root.uri).scheme not in _SCHEMES:
            return False
        return importlib.util.find_spec("boto3") is not None

    def __init__(self, storage_uri: str, root: Location) -> None:
        options = _options(root)
        query = parse_qs(urlsplit(storage_uri).query)
        endpoint = _storage_endpoint(storage_uri)
        # As pyarrow reads it: keys may stand before the bucket, and the prefix is percent-encoded.
        self._bucket = urlsplit(storage_uri).netloc.rpartition("@")[2]
        self._prefix = unquote(urlsplit(storage_uri).path).strip("/")
        region = options.get("region") or query.get("region", [None])[0]
        given = options if region is None else {**options, "region": region}
        self._client = s3_client(given, endpoint)

    def read(self, name: str, start: int) -> bytes:
        source = {"Bucket": self._bucket, "Key": self._key_of(name)}
        with self._telling(name):
            found = self._client.get_object(**source, Range=f"bytes={start}-")
            return bytes(found["Body"].read())

    def put(self, name: str, content: bytes, target: Location) -> None:
        with self._telling(name):
            self._client.put_object(**_destination_of(target), Body=content)

    def copy(self, name: str, start: int, tail: bytes, target: Location) -> None:
        with self._telling(name):
            self._upload(self._key_of(name), start, tail, _destination_of(target))

    def _key_of(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _MISSING:
                raise SegmentCorrupt(f"segment {name!r} is missing") from error
            if code in _REFUSED:
                raise CopyRefused(f"{error.operation_name}: {code}") from error
            if code in _SHORT:
                raise SegmentCorrupt(f"segment {name!r} is shorter than it was") from error
            raise StorageFault(
                f"segment {name!r} cannot be copied: {error.operation_name}: {code}"
            ) from error
        except BotoCoreError as error:
            raise StorageFault(f"segment {name!r} cannot be copied: {type(error).__name__}") from error

    def _upload(self, key: str, start: int, tail: bytes, destination: dict[str, str]) -> None:
        upload = {**destination, "UploadId": self._client.create_multipart_upload(**destination)["UploadId"]}
        try:
            etags = [
                self._client.upload_part_copy(
                    **upload,
                    PartNumber=number,
                    CopySource={"Bucket": self._bucket, "Key": key},
                    CopySourceRange=f"bytes={first}-{last}",
                )["CopyPartResult"]["ETag"]
                for number, (first, last) in enumerate(_ranges(start), 1)
            ]
            last_part = self._client.upload_part(**upload, PartNumber=len(etags) + 1, Body=tail)
            etags.append(last_part["ETag"])
            parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except BaseException:
            self._give_up(upload)
            raise

    def _give_up(self, upload: dict[str, str]) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.abort_multipart_upload(**upload)
        except (BotoCoreError, ClientError):
            pass  # the caller must see the first failure


def _destination_of(target: Location) -> dict[str, str]:
    parts = urlsplit(target.uri)
    # As deltalake names it, which decodes the path of a URI.
    return {"Bucket": parts.netloc, "Key": unquote(parts.path).lstrip("/")}


def _ranges(n_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last byte of each part: as few as may be, none too small."""
    n_parts = -(-n_bytes // LARGEST_PART_BYTES)
    edges = [n_bytes * i // n_parts for i in range(n_parts + 1)]
    for first, end in itertools.pairwise(edges):
        yield first, end - 1


def _options(root: Location) -> dict[str, str]:
    """deltalake's options, by the names without ``aws_``."""
    given = root.storage_options or {}
    return {name.lower().removeprefix("aws_"): value for name, value in given.items()}


def _storage_endpoint(storage_uri: str) -> str | None:
    query = parse_qs(urlsplit(storage_uri).query)
    host = query.get("endpoint_override", [None])[0]
    return environment_endpoint() if host is None else f"{query.get('scheme', ['https'])[0]}://{host}"


def _host(endpoint: str | None) -> str | None:
    """Without the scheme, and without a port that goes without saying."""
    if endpoint is None:
        return None
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    port = parts.port if parts.port not in (80, 443) else None
    return f"{parts.hostname}:{port}"
