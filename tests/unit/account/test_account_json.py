"""The JSON of an account: what is written is read, other versions are refused, and the page names every key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.account.accounts import AT, FULL, SLOT, WELL
from xidstream.pipeline.account import Account, StoredPart
from xidstream.pipeline.account.codec import of_json, to_json
from xidstream.pipeline.errors import Unsupported

PAGE = Path(__file__).parents[3] / "docs" / "status.md"
STOPPED = Account(at=AT, run=None, slot=SLOT, stored=StoredPart("0/1000000", "e", ("xid 7",), "0/F00000", 3))


@pytest.mark.parametrize("account", [FULL, WELL, STOPPED])
def test_an_account_comes_back_from_its_json_as_it_was(account: Account) -> None:
    assert of_json(to_json(account)) == account


def test_the_json_is_plain_numbers_and_text() -> None:
    value = json.loads(to_json(FULL))
    assert value["version"] == 1 and value["at"] == "2026-11-23T01:02:03Z"
    assert value["run"]["system_identifier"] == "7300000000000000001", "a number of 64 bits is no JSON number"
    assert value["open"][0]["xid"] == 749 and value["slot"]["confirmed_lsn"] == "0/1000000"
    assert value["stored"] is None


def test_the_account_of_a_run_without_a_journal_of_its_own_is_read() -> None:
    older = json.loads(to_json(WELL))
    del older["journal"], older["sequencer"]["delivered_lsn"], older["sequencer"]["undelivered_s"]
    assert WELL.sequencer is not None
    sequencer = dataclasses.replace(WELL.sequencer, delivered_lsn=None, undelivered_s=None)
    assert of_json(json.dumps(older)) == dataclasses.replace(WELL, journal=None, sequencer=sequencer)


def test_keys_of_a_newer_run_are_passed_over_and_another_version_is_refused() -> None:
    newer = json.loads(to_json(WELL))
    newer["reader"]["n_of_tomorrow"] = 7
    assert of_json(json.dumps(newer)) == WELL
    newer["version"] = 2
    with pytest.raises(Unsupported, match="version 2, and this xidstream reads version 1"):
        of_json(json.dumps(newer))
    for garbage in ("", "[]", "{}", '{"version": 1}', "nonsense"):
        with pytest.raises(Unsupported):
            of_json(garbage)


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_page_names_every_key() -> None:
    full = dataclasses.replace(FULL, stored=STOPPED.stored)
    in_hand = (
        dataclasses.replace(full, sink=dataclasses.replace(full.sink, in_hand=None)) if full.sink else full
    )
    text = PAGE.read_text(encoding="utf-8")
    missing = {key for key in keys(json.loads(to_json(in_hand))) if f"`{key}`" not in text}
    assert not missing
