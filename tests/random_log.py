"""Random change logs of one table as the server writes them, and what the table held after each transaction.

The table is kept as PostgreSQL would: rows have keys (or not), values that are stored outside of the row and are sent
only when they change, keys that change in chains and swaps, rows that are deleted and inserted again, TRUNCATE.

With a row filter, updates bring rows into it as well. The server sends them as inserts, without the unchanged values
that are stored outside. Nobody can know these, so they are null in the table here until they are set.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = tuple[Any, ...]
Change = dict[str, Any]

COLUMNS = {
    "id": "int",
    "Part": "string",
    "n": "double",
    "body": "string",
    "tags": "array<int>",
    "at": "timestamp_ntz",
    "c0": "decimal(10,2)",
}
TOASTED = ("body", "tags")
CONTRACT = {
    "_change_type": "string",
    "_commit_lsn": "long",
    "_xid": "long",
    "_seq": "long",
    "_unchanged": "array<string>",
    "_text": "map<string,string>",
}


def values_of(row: Change) -> Row:
    """A row of the log or the table, hashable, with what stands in ``_text``; -0.0 and NaN told apart."""
    texts = row.get("_text")
    texts = dict(texts) if texts is not None else {}
    return tuple(
        ("text", texts[name])
        if name in texts
        else repr(row[name])
        if isinstance(row[name], float)
        else tuple(row[name])
        if isinstance(row[name], list)
        else row[name]
        for name in COLUMNS
    )


@dataclass
class RandomLog:
    """``key``: of the table, or None. ``is_full``: under REPLICA IDENTITY FULL. ``row_filter``: whether the publication
    has one; only with a key, and not under FULL, where the old tuple has all values. ``moves``: whether keys change,
    and old keys are sent. ``states``: (commit LSN, rows), the first of them before the log.

    A row's ``_hidden`` names its values that were never sent."""

    seed: int
    key: tuple[str, ...] | None = ("id",)
    is_full: bool = False
    n_transactions: int = 40
    n_keys: int = 12
    truncates: bool = True
    only_inserts: bool = False
    row_filter: bool = False
    moves: bool = True
    base: list[Change] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    states: list[tuple[int, Counter[Row]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert not self.row_filter or (self.key is not None and not self.is_full)
        self._dice = random.Random(self.seed)
        self._rows: list[Change] = []
        for _ in range(self.n_keys if self.key is None else self.n_keys // 2):
            self._rows.append(self._new_row())
        self.base = [dict(row) for row in self._rows]
        self._lsn = 1000
        self._keep_state()
        for _ in range(self.n_transactions):
            self._transaction()

    # -- the table -------------------------------------------------------------------------------------

    def _keep_state(self) -> None:
        self.states.append((self._lsn, Counter(values_of(row) for row in self._rows)))

    def _key_of(self, row: Change) -> Row:
        return tuple(row[name] for name in self.key or ())

    def _free_key(self) -> Change | None:
        taken = {self._key_of(row) for row in self._rows} if self.key is not None else set()
        every = [{"id": i, "Part": part} for i in range(1, self.n_keys + 1) for part in "ab"]
        free = [row for row in every if self._key_of(row) not in taken]
        return dict(self._dice.choice(free)) if free else None

    def _value(self, name: str) -> Any:
        dice = self._dice
        if dice.random() < 0.15:
            return None
        if name == "n":
            return dice.choice([0.0, -0.0, float("nan"), 1.5, 2.5])
        if name == "body":
            return f"body {dice.randint(1, 3)}"
        return [dice.randint(1, 2) for _ in range(dice.randint(0, 2))] if name == "tags" else None

    def _new_row(self) -> Change:
        row = self._free_key()
        assert row is not None
        return row | self._values()

    def _values(self) -> Change:
        row = {name: self._value(name) for name in ("n", "body", "tags", "at", "c0")}
        row["_text"] = self._dice.choice([None, None, {"at": "infinity"}, {"at": "-infinity", "c0": "NaN"}])
        if self._dice.random() < 0.2:
            row["tags"] = None
            row["_text"] = {**(row["_text"] or {}), "tags": f"[0:1]={{{self._dice.randint(1, 2)}}}"}
        return row

    # -- the log ---------------------------------------------------------------------------------------

    def _transaction(self) -> None:
        self._lsn += self._dice.randint(1, 50)
        self._seq = 0
        choices: list[Callable[[], None]] = [self._insert] * 3
        if not self.only_inserts:
            choices += [self._update] * 4 + [self._delete] * 2
            if self.key is not None:
                choices.append(self._again)
            if self.key is not None and self.moves:
                choices += [self._change_key] * 3 + [self._chain, self._swap]
            if self.row_filter:
                choices += [self._enter] * 3
            if self.truncates and self._dice.random() < 0.15:
                choices.append(self._truncate)
        for _ in range(self._dice.randint(1, 5)):
            self._dice.choice(choices)()
        self._keep_state()

    def _log(
        self, kind: str, row: Change | None, unchanged: tuple[str, ...] = (), keys_only: bool = False
    ) -> None:
        row = row or {}
        names = list(self.key or ()) if keys_only else list(COLUMNS)
        sent = [name for name in names if name not in unchanged]
        texts = {name: text for name, text in (row.get("_text") or {}).items() if name in sent}
        change: Change = {name: row.get(name) if name in sent else None for name in COLUMNS}
        change |= {
            "_change_type": kind,
            "_commit_lsn": self._lsn,
            "_xid": self._lsn,
            "_seq": self._seq,
            "_unchanged": sorted(unchanged) or None,
            "_text": texts or None,
        }
        self.changes.append(change)
        # Other tables' rows stand between, but not between an old tuple and the new one.
        self._seq += 1 if kind == "update_preimage" else self._dice.randint(1, 3)

    def _insert(self) -> None:
        if self._free_key() is not None:
            row = self._new_row()
            self._rows.append(row)
            self._log("insert", row)

    def _enter(self) -> None:
        """An update brings a row into the row filter."""
        if self._free_key() is not None:
            self._insert_without(self._new_row())

    def _insert_without(self, row: Change) -> None:
        hidden = tuple(name for name in TOASTED if self._dice.random() < 0.7)
        texts = {name: text for name, text in (row["_text"] or {}).items() if name not in hidden}
        entered = {**row, **dict.fromkeys(hidden), "_text": texts or None, "_hidden": set(hidden)}
        self._rows.append(entered)
        self._log("insert", entered, hidden)

    def _pick(self) -> Change | None:
        return self._dice.choice(self._rows) if self._rows else None

    def _replace(self, old: Change, new: Change, touched: set[str]) -> None:
        is_same_key = self._key_of(old) == self._key_of(new)
        unchanged: tuple[str, ...] = ()
        new["_hidden"] = hidden = set(old.get("_hidden", ())) - touched
        if self.is_full or self.key is None:
            self._log("update_preimage", old)
        else:
            # What was stored outside is told by the dice: small values are sent whole.
            unchanged = tuple(
                name
                for name in TOASTED
                if name not in touched and (self._dice.random() < 0.8 or name in hidden)
            )
            # The old key is sent as well where its value is stored outside of the row.
            if not is_same_key or (self._dice.random() < 0.1 and self.moves):
                self._log("update_preimage", old, keys_only=True)
        self._rows[next(i for i, row in enumerate(self._rows) if row is old)] = new
        self._log("update_postimage", new, unchanged)

    def _update(self) -> None:
        if (old := self._pick()) is not None:
            touched = {name for name in ("n", "body", "tags", "at") if self._dice.random() < 0.3}
            made = {**self._values(), **{name: old[name] for name in ("id", "Part")}}
            self._replace(old, _with(old, made, touched), touched)

    def _change_key(self) -> None:
        old, key = self._pick(), self._free_key()
        if old is not None and key is not None:
            touched = {"body"} if self._dice.random() < 0.3 else set()
            made = {**old, **{name: key[name] for name in self.key or ()}}
            if touched:
                made["body"] = self._value("body")
            self._replace(old, made, touched)

    def _chain(self) -> None:
        """One row through several keys."""
        row = self._pick()
        for _ in range(self._dice.randint(2, 6)):
            key = self._free_key()
            if row is None or key is None:
                return
            made = {**row, **{name: key[name] for name in self.key or ()}}
            self._replace(row, made, set())
            row = made

    def _swap(self) -> None:
        """Two rows, through a third key."""
        key = self._free_key()
        if key is None or len(self._rows) < 2:
            return
        a, b = self._dice.sample(self._rows, 2)
        names = self.key or ()
        third = {**a, **{name: key[name] for name in names}}
        self._replace(a, third, set())
        moved = {**b, **{name: a[name] for name in names}}
        self._replace(b, moved, set())
        self._replace(third, {**third, **{name: b[name] for name in names}}, set())

    def _remove(self, row: Change) -> None:
        self._rows = [each for each in self._rows if each is not row]
        self._log("delete", row, keys_only=not (self.is_full or self.key is None))

    def _delete(self) -> None:
        if (row := self._pick()) is not None:
            self._remove(row)

    def _again(self) -> None:
        """The same key, another row."""
        if (row := self._pick()) is not None:
            self._remove(row)
            made = {**row, **self._values(), "_hidden": set()}
            if self.row_filter and self._dice.random() < 0.5:
                self._insert_without(made)
                return
            self._rows.append(made)
            self._log("insert", made)

    def _truncate(self) -> None:
        self._rows = []
        self._log("truncate", None)


def _with(old: Change, made: Change, names: set[str]) -> Change:
    new = dict(old)
    texts = dict(old["_text"] or {})
    for name in names:
        new[name] = made[name]
        texts.pop(name, None)
        if name in (made["_text"] or {}):
            texts[name] = made["_text"][name]
    new["_text"] = texts or None
    return new
