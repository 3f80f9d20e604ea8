"""What Azure alone has of copies inside a store: URIs, and four kinds of credentials. The rest is in
test_store_copies."""

from __future__ import annotations

import importlib.util
import os
import socket
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError
from azure.identity import ClientSecretCredential, DefaultAzureCredential
from azure.storage.blob import ExponentialRetry

from tests.azurite import program
from tests.late_segments import late_part
from tests.unit.log_tables.copying_stores import AzureStore, azure_store, large
from tests.unit.log_tables.test_segment_links import World
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables import azure_copies
from xidstream.pipeline.log_tables.azure_copies import LARGEST_BLOCK_BYTES, AzureCopies, _Reading
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.segment_links import Reach, how_segments_reach, may_reach
from xidstream.pipeline.log_tables.store_copies import SMALLEST_COPY_BYTES

ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "shop"}


@pytest.fixture(autouse=True)
def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("storage", [
    "abfs://lake@shop.dfs.core.windows.net/a/b", "abfss://shop.blob.core.windows.net/lake/a%20b/", "abfs://shop@lake/p",
])  # fmt: skip
@pytest.mark.parametrize(
    ("root", "options"),
    [("abfs://other/tables", ACCOUNT), ("abfss://other@shop.dfs.core.windows.net/tables", None)],
)
def test_the_four_forms_of_a_storages_uri_name_one_account(
    storage: str, root: str, options: dict[str, str] | None
) -> None:
    assert how_segments_reach(Location.parse(root, options), storage) is Reach.SERVER_SIDE_COPY


@pytest.mark.parametrize(
    ("storage", "root", "options"),
    [
        ("abfs://other@lake/p", "abfs://lake/tables", ACCOUNT),
        ("abfs://lake/p", "abfs://lake/tables", ACCOUNT),
        ("abfs://shop@lake/p", "abfs://lake/tables", None),
        (
            "abfs://shop@lake/p",
            "abfs://lake/tables",
            {**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "http://other/shop"},
        ),
        ("abfs://shop@lake/p", "abfss://lake@shop.dfs.fabric.microsoft.com/tables", ACCOUNT),
        ("abfs://shop@lake/p?blob_storage_authority=.blob.core.chinacloudapi.cn", "abfs://lake/t", ACCOUNT),
    ],
    ids=[
        "two accounts",
        "no account of the storage",
        "none of the tables",
        "another endpoint",
        "Fabric",
        "cloud",
    ],
)
def test_two_accounts_and_those_that_are_not_told_have_no_way_but_spark(
    storage: str, root: str, options: dict[str, str] | None
) -> None:
    location = Location.parse(root, options)
    assert how_segments_reach(location, storage) is Reach.SPARK
    assert may_reach(location, storage), "the buffers write segments as files all the same"


def test_an_endpoint_of_ones_own_is_the_same_one_both_ways() -> None:
    options = {"azure_storage_account_name": "a", "azure_storage_endpoint": "http://127.0.0.1:9/a/"}
    root = Location.parse("abfs://lake/tables", options)
    assert AzureCopies.can_copy("abfs://a@127.0.0.1:9/lake/p?enable_tls=false", root)
    assert not AzureCopies.can_copy("abfs://a@127.0.0.1:9/lake/p", root)


def test_the_environment_tells_what_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "shop")
    assert AzureCopies.can_copy("abfs://shop@lake/p", Location.parse("abfs://lake/tables"))
    assert not AzureCopies.can_copy(
        "abfs://shop@lake/p", Location.parse("abfs://lake/tables", {"account_name": "x"})
    )


def test_the_store_reads_on_behalf_of_whom_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = SimpleNamespace(
        url="https://shop.blob.core.windows.net/lake/a", container_name="lake", blob_name="a"
    )
    key = _Reading("shop", {"account_key": "a2V5"}).of(source)
    assert "sp=r&" in key.url and "sig=" in key.url and key.authorization is None
    signature = _Reading("shop", {"sas_token": "?sig=x"}).of(source)
    assert (signature.url, signature.authorization) == (f"{source.url}?sig=x", None)
    client = _Reading("shop", {"client_id": "i", "client_secret": "s", "tenant_id": "t"})
    assert isinstance(client.credential, ClientSecretCredential)
    found = _Reading("shop", {"client_id": "i"})
    assert isinstance(found.credential, DefaultAzureCredential)
    found.credential = SimpleNamespace(get_token=lambda scope: SimpleNamespace(token=f"for {scope}"))
    told = found.of(source)
    assert (told.url, told.authorization) == (source.url, "Bearer for https://storage.azure.com/.default")


def test_nothing_that_is_raised_or_shown_has_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azure.storage.blob.ExponentialRetry", lambda **_: ExponentialRetry(retry_total=0))
    with socket.socket() as nobody:  # it is bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        options = {**ACCOUNT, "azure_endpoint": f"http://{host}/shop", "azure_sas_token": "sv=1&sig=SECRET"}
        root = Location.parse("abfs://lake/tables", options)
        copies = AzureCopies(f"abfs://shop@{host}/lake/p?enable_tls=false", root)
        for start in (100, SMALLEST_COPY_BYTES):
            with pytest.raises(StorageFault, match="ServiceRequestError") as raised:
                copies.copy("segment", start, b"end", root.child("public.a/file"))
            assert "SECRET" not in "".join(traceback.format_exception(raised.value))
    source: Any = SimpleNamespace(url="https://shop.blob.core.windows.net/lake/a")
    allowed = copies._reading.of(source)
    assert "SECRET" in allowed.url and "SECRET" not in repr(allowed)


def test_copies_want_the_client_of_blobs_and_not_some_other_of_azures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of Azure's other clients, for queues, brings ``azure.storage`` alone: each batch failed over the import."""
    root, find = Location.parse("abfs://lake/tables", ACCOUNT), importlib.util.find_spec
    assert AzureCopies.may_copy("abfs://shop@lake/p", root)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "azure.storage.blob" else find(name)
    )
    assert not AzureCopies.may_copy("abfs://shop@lake/p", root)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureStore]:
    found = program()
    if found is None:
        pytest.skip("Azurite is not here: CONTRIBUTING.md")
    with azure_store(found, tmp_path_factory.mktemp("azurite")) as store:
        yield store


@pytest.fixture
def world(store: AzureStore) -> Iterator[World]:
    world = store.new_world()
    yield world
    world.links.close()


def test_a_long_segment_is_copied_block_by_block(
    store: AzureStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = late_part(large(world), 0x1000)
    assert part.segment.n_bytes < LARGEST_BLOCK_BYTES
    monkeypatch.setattr(azure_copies, "LARGEST_BLOCK_BYTES", 1_000_000)
    n_before = len(store.proxy.passed)
    files, _ = world.give([part])
    passed = [each.what for each in store.proxy.passed[n_before:]]
    assert sum("comp=block&" in what for what in passed) == part.segment.file.head_bytes // 1_000_000 + 2
    world.commit(files)
    assert [row["id"] for row in world.read()] == list(range(part.n_rows))


def test_a_signature_is_enough_where_it_may_read_and_write(store: AzureStore, world: World) -> None:
    options = dict(world.root.storage_options or {})
    options["AZURE_STORAGE_SAS_TOKEN"] = world.storage.uri.partition("enable_tls=false&")[2]
    del options["AZURE_STORAGE_ACCOUNT_KEY"]
    signed = World(world.storage.uri, world.root.uri, options)
    files, left = signed.give([late_part(large(signed), 0x1000), late_part(signed.segment(1), 0x2000)])
    signed.links.close()
    assert (len(files), left.n_rows) == (2, 0)


def test_credentials_that_are_not_found_have_spark_write(
    store: AzureStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: object, source: object) -> object:
        raise ClientAuthenticationError("no identity here")

    monkeypatch.setattr(_Reading, "of", none)
    with pytest.warns(RuntimeWarning, match="no credentials"):
        files, left = world.give([late_part(large(world), 0x1000)])
    assert files == [] and left.n_rows
