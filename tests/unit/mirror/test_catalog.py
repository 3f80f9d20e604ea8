"""Which entries a catalog gets for base tables, and which it keeps, whatever happens to either of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.mirror.bases import SLOT, PlainMirror
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.errors import ComponentLost, ConfigError, StorageFault, Unsupported
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import KEY, SOURCE, TYPES
from xidstream.pipeline.mirror.base_table import LEFT_OUT, TEXT_FIELD, BaseFacts, BaseTable, MirrorMarks
from xidstream.pipeline.mirror.catalog import (
    LIST_EVERY_S,
    CatalogColumn,
    CatalogTable,
    Registered,
    Registration,
    entry_of,
    hive_type,
    name_of,
)
from xidstream.pipeline.mirror.catalog import (
    SLOT as SLOT_PROPERTY,
)
from xidstream.pipeline.settings.catalog_names import CatalogName

A, B = "public.a", "public.b"


class Kept:
    """A catalog in memory, which notes what it is asked. ``failing``: everything fails."""

    def __init__(self) -> None:
        self.entries: dict[str, CatalogTable] = {}
        self.asked: list[str] = []
        self.failing = False
        self.unfit: set[str] = set()

    def __str__(self) -> str:
        return "kept:shop"

    def uri_of(self, table: Location) -> str:
        return table.uri

    def _note(self, what: str) -> None:
        if self.failing:
            raise StorageFault("the catalog is away")
        self.asked.append(what)

    def tables(self) -> list[CatalogTable]:
        self._note("list")
        return list(self.entries.values())

    def put(self, table: CatalogTable, *, instead_of: CatalogTable | None) -> None:
        self._note(f"{'new' if instead_of is None else 'change'} {table.name}")
        if table.name in self.unfit:
            raise Unsupported("no such names here")
        assert instead_of == self.entries.get(table.name)
        self.entries[table.name] = table

    def remove(self, table: CatalogTable) -> None:
        self._note(f"remove {table.name}")
        assert self.entries.pop(table.name) == table

    def since(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


class Setting:
    """A mirror of two tables, a catalog, and what registers the ones in the other."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.mirror = PlainMirror(root, (A, B))
        self.mirror.refresh(10)
        self.catalog = Kept()
        self.now_s = 0.0
        self.registration = self.anew()

    def anew(self) -> Registration:
        """As of another process."""
        return Registration(self.root, self.catalog, lambda: self.now_s)

    def bring(self, told: Mapping[str, BaseFacts] = {}, **more: Any) -> Registered:
        return self.registration.bring(self.mirror.manifest.newest(), told, SLOT, **more)

    def base(self, label: str) -> BaseTable:
        found = BaseTable.open(
            DeltaBases(self.root), label, label, MirrorMarks(SLOT, self.mirror.manifest.owner)
        )
        assert found is not None
        return found

    def leave_out(self, label: str, lsn: int) -> None:
        """A refresh that names the other tables alone."""
        self.base(label).leave_out("it was renamed")
        self.mirror.tables = tuple(name for name in (A, B) if name != label)
        self.mirror.refresh(lsn)


@pytest.fixture
def shop(tmp_path: Path) -> Setting:
    return Setting(Location.parse(str(tmp_path)))


def test_each_table_gets_an_entry_once_and_a_refresh_of_rows_asks_nothing(shop: Setting) -> None:
    assert shop.bring() == Registered(2, 2, 0)
    assert shop.catalog.since() == ["list", "new public_a", "new public_b"]
    entry = shop.catalog.entries["public_a"]
    assert entry.uri == f"{shop.root.uri}/current/public.a"
    assert [(column.name, column.type) for column in entry.columns] == [("id", "bigint"), ("v", "bigint")]
    assert entry.properties == {SOURCE: A, SLOT_PROPERTY: SLOT, KEY: '["id"]'}
    shop.mirror.refresh(20)
    assert shop.bring() == Registered(2, 0, 0)
    assert shop.catalog.since() == []


def test_another_process_finds_what_is_there_and_changes_nothing(shop: Setting) -> None:
    shop.bring()
    shop.catalog.since()
    shop.registration = shop.anew()
    assert shop.bring() == Registered(2, 0, 0)
    assert shop.catalog.since() == ["list"]


def test_a_new_column_changes_the_entry(shop: Setting) -> None:
    shop.bring()
    shop.catalog.since()
    base = shop.base(A)
    base.add_columns([pa.field("note", pa.string())])
    shop.mirror.refresh(20)
    assert shop.bring({A: base.facts}) == Registered(2, 1, 0)
    assert shop.catalog.since() == ["change public_a"]
    assert [column.name for column in shop.catalog.entries["public_a"].columns] == ["id", "v", "note"]


def test_a_table_that_is_left_out_says_so_and_goes_when_its_rows_do(shop: Setting) -> None:
    shop.bring()
    shop.catalog.since()
    shop.leave_out(B, 20)
    assert shop.bring() == Registered(2, 1, 0)
    entry = shop.catalog.entries["public_b"]
    assert json.loads(entry.properties[LEFT_OUT])["reason"] == "it was renamed"
    assert entry.comment.endswith("as of 0/A, not refreshed any more: it was renamed")
    assert shop.bring() == Registered(2, 0, 0)
    shop.base(B).empty()
    shop.now_s += LIST_EVERY_S
    assert shop.bring() == Registered(1, 0, 1)
    assert set(shop.catalog.entries) == {"public_a"}


def test_a_table_whose_directory_is_gone_goes_and_comes_back_when_it_is_made_again(shop: Setting) -> None:
    shop.bring()
    shop.leave_out(B, 20)
    shutil.rmtree(current(shop.root).child(B).uri)
    assert shop.bring() == Registered(1, 0, 1)
    shop.mirror.tables = (A, B)
    shop.mirror.refresh(30)
    assert shop.bring() == Registered(2, 1, 0)
    assert LEFT_OUT not in shop.catalog.entries["public_b"].properties


def test_a_table_that_is_kept_up_again_says_so(shop: Setting) -> None:
    shop.bring()
    shop.leave_out(B, 20)
    shop.bring()
    shop.mirror.tables = (A, B)
    shop.base(B).leave_out(None)
    shop.mirror.refresh(30)
    assert shop.bring({B: shop.base(B).facts}) == Registered(2, 1, 0)
    assert LEFT_OUT not in shop.catalog.entries["public_b"].properties


@pytest.mark.parametrize("change", [{SLOT_PROPERTY: "7/shop/other"}, {SLOT_PROPERTY: ""}, None])
def test_entries_of_others_are_never_touched(shop: Setting, change: dict[str, str] | None) -> None:
    """Of another slot, of nobody, and of this slot's log in another place."""
    uri = f"{shop.root.uri}/current/public.a" if change else "/elsewhere/current/public.a"
    theirs = CatalogTable("public_a", uri, "", (), {SOURCE: A, SLOT_PROPERTY: SLOT, **(change or {})})
    shop.catalog.entries = {"public_a": theirs, "mine": CatalogTable("mine", "/m", "", (), {})}
    assert shop.bring() == Registered(1, 1, 0, {A: "another table has its name there, public_a"})
    assert shop.catalog.entries["public_a"] is theirs and "mine" in shop.catalog.entries


def test_of_two_tables_with_one_name_the_one_that_has_it_keeps_it(shop: Setting) -> None:
    shop.bring()
    shop.mirror.tables = ("public.A", A, B)
    shop.mirror.refresh(20)
    for _ in range(2):
        assert shop.bring() == Registered(2, 0, 0, {"public.A": "public.a has its name there, public_a"})
        shop.registration = shop.anew()
    assert shop.catalog.entries["public_a"].source == A


def test_an_entry_that_the_catalog_does_not_take_holds_up_no_other(shop: Setting) -> None:
    shop.catalog.unfit = {"public_a"}
    assert shop.bring() == Registered(1, 1, 0, {A: "no such names here"})
    assert set(shop.catalog.entries) == {"public_b"}


def test_behind_a_failure_all_is_looked_at_again(shop: Setting) -> None:
    shop.bring()
    base = shop.base(A)
    base.add_columns([pa.field("note", pa.string())])
    shop.mirror.refresh(20)
    shop.catalog.failing = True
    with pytest.raises(StorageFault):
        shop.bring({A: base.facts})
    shop.catalog.failing = False
    del shop.catalog.entries["public_b"]
    shop.catalog.since()
    assert shop.bring({A: base.facts}) == Registered(2, 2, 0)
    assert shop.catalog.since() == ["list", "change public_a", "new public_b"]


def test_what_others_removed_comes_back_with_the_next_listing(shop: Setting) -> None:
    shop.bring()
    del shop.catalog.entries["public_a"]
    shop.bring()
    assert "public_a" not in shop.catalog.entries
    shop.now_s += LIST_EVERY_S
    assert shop.bring() == Registered(2, 1, 0)


def test_it_is_given_up_between_two_entries_and_goes_on_where_it_was(shop: Setting) -> None:
    asked = iter([None, None, None, ComponentLost("given up")])

    def check() -> None:
        if (error := next(asked, None)) is not None:
            raise error

    with pytest.raises(ComponentLost):
        shop.bring(check=check)
    assert set(shop.catalog.entries) == {"public_a"}
    assert shop.bring() == Registered(2, 1, 0)


def test_columns_have_hives_types_and_say_postgresqls_and_the_key() -> None:
    fields = (
        pa.field("id", pa.int64()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.string())),
        TEXT_FIELD,
    )
    types = {"id": "bigint", "price": "numeric(12,2)", "at": "timestamp with time zone", "tags": "text[]"}
    entry = entry_of(A, "s3://b/a", BaseFacts(fields, {KEY: '["id"]', TYPES: json.dumps(types)}), SLOT)
    assert entry.columns == (
        CatalogColumn("id", "bigint", "bigint, key"),
        CatalogColumn("price", "decimal(12,2)", "numeric(12,2)"),
        CatalogColumn("at", "timestamp", "timestamp with time zone"),
        CatalogColumn("tags", "array<string>", "text[]"),
        CatalogColumn("_text", "map<string,string>", ""),
    )


def test_a_type_that_no_base_table_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="uint8"):
        hive_type(pa.uint8())


def test_names_are_small_letters_and_others_are_told_apart() -> None:
    assert name_of("public.Orders") == "public_orders"
    assert name_of('"a.b".c') != name_of("a_b.c") == "a_b_c"
    russian = [name_of("public.заказы"), name_of("public.товары")]
    assert russian[0] != russian[1] and all(name.startswith("public_______") for name in russian)
    long = [name_of("public." + "t" * 63 + end) for end in ("a" * 200, "b" * 200)]
    assert len(set(long)) == 2 and {len(name) for name in long} == {128}


@pytest.mark.parametrize(
    "text", ["glue:", "glue", "shop", "glue:Shop", "glue:a/b", "hive:shop", "glue:shop:x"]
)
def test_a_setting_that_names_no_catalog_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="mirror_catalog"):
        CatalogName.parse(text)


def test_a_setting_names_a_database_of_glue_or_nothing() -> None:
    assert CatalogName.parse("") is None
    assert str(CatalogName.parse("glue:shop_2")) == "glue:shop_2"
