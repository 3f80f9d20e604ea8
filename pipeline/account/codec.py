"""An account as JSON, and back. pydantic does the work, which Ray brings in any case.

It is a module of its own because pydantic takes a moment to import: the actors that make parts need none of it. A key
that is missing or unknown is no error within one version, so a newer ``xidstream status`` reads an older run's account.
"""

from __future__ import annotations

import json
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from xidstream.pipeline.account.model import VERSION, Account
from xidstream.pipeline.errors import Unsupported


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Account]:
    return TypeAdapter(Account)


def to_json(account: Account, *, indent: int | None = None) -> str:
    return _adapter().dump_json(account, indent=indent).decode()


def of_json(text: str) -> Account:
    """Raises Unsupported for the account of another version, and for what is no account."""
    try:
        version = json.loads(text)["version"]
        if version != VERSION:
            raise Unsupported(
                f"the run gives its account in version {version}, and this xidstream reads version {VERSION}",
                remedy="use the xidstream of the run, or `xidstream status --json`",
            )
        return _adapter().validate_json(text)
    except (ValueError, KeyError, TypeError, ValidationError):
        # The error itself quotes the text.
        raise Unsupported(
            "the answer is not an account of a run", remedy="use the xidstream of the run"
        ) from None
