"""Small files of tables in S3, each put by one request.

deltalake's file system uploads every file in parts, however small: three requests where one would do, and it has no
option for that. The store bills each of them. So what is written is buffered until it is known to be small, and boto3
puts it then. What grows beyond ``SMALL_BYTES`` goes to deltalake's upload, in which that would have been the first
part.

boto3 is an optional dependency (``pip install xidstream[s3]``), and another client than the one that commits. So it is
used only where all that it is told means to it what it means to deltalake: keys, a region, an endpoint. Any other
option (encryption, a role, a proxy) leaves all files to deltalake, and so does a store that refuses a put. A put that
fails otherwise leaves its own file to deltalake, which tries again as often as it does.

Rejected: pyarrow's file system of S3, which puts a small file in one request, too, but finds neither all credentials
that deltalake finds, nor those of the environment under all of their names; and obstore, whose options are
deltalake's and whose credentials are not.

Called by ``Location.create``, on any thread.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa

SMALL_BYTES: Final = 5 << 20
_CHUNK_BYTES: Final = 512 << 10
_SCHEMES: Final = ("s3", "s3a")
_REFUSED: Final = frozenset({400, 401, 403, 405, 411, 501})
"""Answers that the next file would get, too."""
_SAME: Final = frozenset(
    ("access_key_id", "secret_access_key", "session_token", "region", "default_region")
).union(("endpoint", "endpoint_url", "allow_http", "conditional_put", "copy_if_not_exists"))
"""Options of deltalake, without ``aws_``, that boto3 is given, or that a put of a new object does not touch."""
_SAME_HERE: Final = _SAME.union(
    ("endpoint_url_s3", "profile", "config_file", "shared_credentials_file", "sts_regional_endpoints"),
    ("role_arn", "role_session_name", "web_identity_token_file", "container_authorization_token"),
    ("container_credentials_relative_uri", "container_credentials_full_uri", "ec2_metadata_disabled"),
    ("ca_bundle", "max_attempts", "retry_mode", "execution_env", "pager", "default_output"),
)
"""Variables of the environment, without ``AWS_``. Both clients read them alike where no option is given, or they do not
matter to an object."""


def small_put(
    uri: str, path: str, options: Mapping[str, str] | None, upload: Callable[[], pa.NativeFile]
) -> pa.NativeFile | None:
    """A file to write, ``path`` below ``uri``, which is put when it is closed. ``upload`` opens deltalake's, where it
    comes to that. None where deltalake must write whatever it is."""
    parts = urlsplit(uri)
    if parts.scheme not in _SCHEMES or importlib.util.find_spec("boto3") is None:
        return None
    given = {name.lower().removeprefix("aws_"): value for name, value in (options or {}).items()}
    here = [name.lower().removeprefix("aws_") for name in os.environ if name.startswith("AWS_")]
    if not (_SAME.issuperset(given) and _SAME_HERE.issuperset(here)):
        return None
    puts = _puts(frozenset(given.items()), endpoint_of(given))
    if puts.is_refused:
        return None
    # As deltalake names it, which decodes the path of a table's URI.
    key = f"{unquote(parts.path)}/{path}".lstrip("/")
    return pa.PythonFile(
        _BufferedFile(lambda content: puts.put(parts.netloc, key, content), upload), mode="w"
    )


def endpoint_of(options: Mapping[str, str]) -> str | None:
    """Where deltalake finds the store, by its options without ``aws_``; None for Amazon's own."""
    return options.get("endpoint_url") or options.get("endpoint") or environment_endpoint()


def environment_endpoint() -> str | None:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def s3_client(options: Mapping[str, str], endpoint: str | None, **config: Any) -> Any:
    """boto3's, which any thread may use. ``options``: deltalake's, without ``aws_``. ``config``: more of botocore's."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region") or options.get("default_region"),
        aws_access_key_id=options.get("access_key_id"),
        aws_secret_access_key=options.get("secret_access_key"),
        aws_session_token=options.get("session_token"),
        config=Config(
            # As pyarrow and deltalake address a store of one's own.
            s3={"addressing_style": "path" if endpoint else "auto"},
            # A store of one's own may know no checksums after the content.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=16,
            **config,
        ),
    )


class _Puts:
    """Into one store, with one set of credentials."""

    def __init__(self, options: Mapping[str, str], endpoint: str | None) -> None:
        self._client = s3_client(options, endpoint, retries={"total_max_attempts": 1})
        self.is_refused = False

    def put(self, bucket: str, key: str, content: bytes) -> bool:
        """Whether it is there."""
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from botocore.exceptions import ConnectionError as NotReached

        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=content)
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            self.is_refused = self.is_refused or status in _REFUSED
        except BotoCoreError as error:
            # Beside a failure on the way: no credentials, or no region.
            self.is_refused = self.is_refused or not isinstance(error, (NotReached, HTTPClientError))
        else:
            return True
        return False


@lru_cache(maxsize=8)
def _puts(options: frozenset[tuple[str, str]], endpoint: str | None) -> _Puts:
    return _Puts(dict(options), endpoint)


class _BufferedFile:
    """What ``pa.PythonFile`` writes to."""

    def __init__(self, put: Callable[[bytes], bool], upload: Callable[[], pa.NativeFile]) -> None:
        self._put = put
        self._open = upload
        self._buffered = bytearray()
        self._upload: pa.NativeFile | None = None
        self._n_bytes = 0
        self.closed = False

    def write(self, content: bytes | pa.Buffer) -> int:
        self._n_bytes += len(content)
        if self._upload is not None:
            self._send(content)
        else:
            self._buffered += content
            if len(self._buffered) > SMALL_BYTES:
                self._begin_upload()
        return len(content)

    def tell(self) -> int:
        return self._n_bytes

    def flush(self) -> None:
        """Nothing is there before the end."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._upload is None and not self._put(bytes(self._buffered)):
            self._begin_upload()
        if self._upload is not None:
            self._upload.close()

    def _begin_upload(self) -> None:
        self._upload = pa.BufferedOutputStream(self._open(), 2 * _CHUNK_BYTES)
        self._send(self._buffered)
        self._buffered = bytearray()

    def _send(self, content: bytes | bytearray | pa.Buffer) -> None:
        # deltalake's file takes bytes alone. Arrow makes them of what it has buffered, and of nothing larger.
        assert self._upload is not None
        rest = memoryview(content)
        while rest:
            self._upload.write(rest[:_CHUNK_BYTES])
            rest = rest[_CHUNK_BYTES:]
