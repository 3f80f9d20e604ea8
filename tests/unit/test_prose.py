"""Docstrings begin with their noun or their verb, so that a reader needs no line above to complete the sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPENDENT = re.compile(r"(Of|Those|The same|As)\b")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of modules, classes and functions, and those below attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def test_no_docstring_begins_with_a_genitive_or_a_pronoun_for_what_stands_above() -> None:
    dependent = []
    n_seen = 0
    for floor in ("pipeline", "actors", "xidstream"):
        for path in sorted((ROOT / floor).glob("**/*.py")):
            for docstring in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
                n_seen += 1
                if DEPENDENT.match(str(docstring.value).strip()):
                    dependent.append(f"{path.relative_to(ROOT)}:{docstring.lineno}")
    assert n_seen > 1000
    assert not dependent
