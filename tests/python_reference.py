"""The reference of the public names in docs/python.md, made from their docstrings: ``make docs`` writes it.

A test compares it. The names are ``xidstream.__all__``, and of a class its public members; of ``Config`` only its
constructors, because docs/settings.md has the settings.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any, Final

import xidstream
from xidstream import errors
from xidstream.pipeline.errors import POLICY, XidstreamError

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
BEGIN, END = "<!-- made by `make docs` -->\n", "<!-- end -->\n"
CHOSEN: Final = {
    "Config": ("load", "of"),
    "ChangeLog": (
        "last_commit_lsn",
        "proven_lsn",
        "readable_lsn",
        "wait",
        "tables",
        "transactions",
        "as_of",
        "changes",
    ),
}
ORDER: Final = (
    *("spark_session", "ChangeStream", "StreamingQuery", "SparkBatch"),
    *("ChangeLog", "LogState", "Mirror", "Lsn", "Config"),
)


def reference() -> str:
    assert set(ORDER) == set(xidstream.__all__) - {"__version__", "errors"}
    return "\n".join(_entry(name, getattr(xidstream, name)) for name in ORDER) + f"\n{_errors()}"


def page_with_reference(page: str) -> str:
    """The page with its reference renewed. ValueError where the marks are missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


def members(name: str, cls: type) -> list[str]:
    """In the order of the source."""
    public = [n for n in vars(cls) if not n.startswith("_") or n == "__getitem__"]
    return list(CHOSEN.get(name, public))


def _entry(name: str, thing: Any) -> str:
    if not isinstance(thing, type):
        return f"### {_signature(name, thing)}\n\n{_text(thing)}\n"
    made = {"Config": "Config", "Lsn": "Lsn(value: int)"}
    made |= {each: _bare(each, thing) for each in ("ChangeStream", "ChangeLog", "Mirror") if each == name}
    parts = [f"### `{made.get(name, name)}`\n\n{_text(thing)}\n"]
    for member in members(name, thing):
        found = inspect.getattr_static(thing, member)
        if isinstance(found, (classmethod, staticmethod)):
            head = _signature(f"{name}.{member}", found.__func__)
        elif inspect.isfunction(found):
            head = _signature(f".{member}", found)
        else:
            head = f"`.{member}`{_type_of(found)}"
        parts.append(f"**{head}**  \n{_text(found)}\n")
    return "\n".join(parts)


def _errors() -> str:
    """A base class stands before its subclasses, as in the module."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, XidstreamError)]
    lines = ["### `errors`\n", "| class | is a | | exit status |", "| --- | --- | --- | --- |"]
    for cls in classes:
        base = "" if cls is XidstreamError else f"`{cls.__base__.__name__}`"  # type: ignore[union-attr]
        text = _text(cls).split("\n\n")[0].replace("\n", " ")
        policy = next(POLICY[c] for c in cls.__mro__ if c in POLICY)
        lines.append(f"| `{cls.__name__}` | {base} | {text} | {int(policy.exit_status)} |")
    return "\n".join(lines) + "\n"


def _type_of(found: Any) -> str:
    function = found.fget if isinstance(found, property) else found.func
    assert isinstance(found, (property, functools.cached_property))
    return f" : `{inspect.signature(function).return_annotation}`"


def _bare(name: str, cls: type) -> str:
    return _signature(name, cls.__init__).strip("`").removesuffix(" -> None")  # type: ignore[misc]


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    without = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=without)))
    return f"`{name}{shown}`"


def _text(thing: Any) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing} is public and has no docstring"
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page_with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
