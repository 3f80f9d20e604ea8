"""Files of tables in S3: how many requests one is, and who puts it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.s3_server import CountedS3, S3Server, counted_s3
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.s3_puts import SMALL_BYTES, _Puts


class RefusesWholeObjects(S3Server):
    """But those of a Delta log."""

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        is_put = environ["REQUEST_METHOD"] == "PUT" and not environ.get("QUERY_STRING")
        if is_put and ".parquet" in environ["PATH_INFO"]:
            environ["QUERY_STRING"] = "whole"
            with self.refusing("whole"):
                return super()._answer(environ, start_response)
        return super()._answer(environ, start_response)


@pytest.fixture(scope="module")
def s3() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


def table(s3: CountedS3, **options: str) -> Location:
    return Location(f"{s3.uri}/of a%20root/{uuid.uuid4().hex}/public.t~C3~A4", {**s3.options, **options})


def written(location: Location, content: bytes, chunk: int = 1 << 20) -> str:
    path = f"job-{uuid.uuid4().hex}/part-00000.parquet"
    with location.create(path) as file:
        # As Parquet's writer, which is no Python: deltalake's file takes no buffer of Python's.
        buffered = pa.BufferedOutputStream(file, 2 * chunk)
        for i in range(0, len(content), chunk):
            buffered.write(content[i : i + chunk])
        buffered.flush()
        assert file.tell() == len(content)
    assert location.read(path) == content
    return path


def methods(s3: CountedS3, path: str) -> list[str]:
    return [each.what.split()[0] for each in s3.asked(path) if each.what.split()[0] not in ("GET", "HEAD")]


def test_a_small_file_is_one_request_and_a_large_one_is_uploaded_in_parts(s3: CountedS3) -> None:
    location = table(s3)
    for content in (b"", b"PAR1", bytes(SMALL_BYTES)):
        assert methods(s3, written(location, content)) == ["PUT"]
    content = bytes(range(256)) * (SMALL_BYTES // 256) + b"!"
    assert methods(s3, written(location, content)) == ["POST", "PUT", "PUT", "POST"]


@pytest.mark.parametrize("option", ["AWS_SERVER_SIDE_ENCRYPTION", "timeout"])
def test_where_an_option_is_for_deltalake_alone_it_writes_all_files(s3: CountedS3, option: str) -> None:
    location = table(s3, **{option: {"timeout": "30s"}.get(option, "AES256")})
    assert methods(s3, written(location, b"PAR1")) == ["POST", "PUT", "POST"]


def test_so_it_is_with_what_the_environment_says(s3: CountedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    location = table(s3)
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    assert methods(s3, written(location, b"PAR1")) == ["POST", "PUT", "POST"]


def test_a_store_that_refuses_a_put_is_asked_once_and_has_every_file() -> None:
    with counted_s3(RefusesWholeObjects) as s3:
        location = table(s3)
        assert methods(s3, written(location, b"one")) == ["PUT", "POST", "PUT", "POST"]
        assert methods(s3, written(location, b"two")) == ["POST", "PUT", "POST"]


def test_a_put_that_fails_on_the_way_is_no_refusal() -> None:
    server = S3Server()
    puts = _Puts({"region": "us-east-1"}, f"http://127.0.0.1:{server.port}")
    server.failing = True
    assert not puts.put(server.bucket, "a", b"1")
    server.stop()
    assert not puts.put(server.bucket, "a", b"1")
    assert not puts.is_refused
    server.failing = False
    server.start()
    assert puts.put(server.bucket, "a", b"1")
    server.stop()
