"""The lists of docs/messages.md, read from the sources: ``make docs`` writes them, a test compares them."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.settings_table import BEGIN, END
from xidstream.pipeline import errors
from xidstream.pipeline.errors import POLICY, XidstreamError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "messages.md"
FACTORIES = {"ok": "ok", "warning": "warn", "failed": "FAIL", "not_checked": "?"}
LINES = {"echo", "line", "_tell", "tell", "_say", "print", "warn", "show", "Notice"}
CLASSES = {
    name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, XidstreamError)
}


class Message(NamedTuple):
    kind: str
    name: str
    text: str
    remedy: str
    module: str
    line: int


def text_of(node: ast.AST, constants: dict[str, ast.expr], depth: int = 0) -> str:
    go = lambda n: text_of(n, constants, depth + 1)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(go(v) for v in node.values)
    if isinstance(node, ast.FormattedValue):
        return go(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return go(node.left) + go(node.right)
    if isinstance(node, ast.IfExp):
        return f"[{go(node.body)}|{go(node.orelse)}]"
    if isinstance(node, ast.Name):
        if node.id in constants and depth < 6:
            return go(constants[node.id])
        return "{" + node.id + "}"
    if isinstance(node, ast.Attribute):
        return "{" + node.attr + "}"
    if isinstance(node, ast.Call):
        f = node.func
        n = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "?")
        if n == "counted" and len(node.args) == 2:
            return "{n} " + go(node.args[1]) + "(s)"
        if n == "join":
            return "{" + ast.unparse(node.args[0])[:30] + "}"
        return "{" + (ast.unparse(node.args[0]) if len(node.args) == 1 else n)[:30] + "}"
    return "{" + ast.unparse(node)[:30] + "}"


def scan():
    out = []
    consts = {}
    trees = {}
    for p in sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("actors/**/*.py")]):
        t = ast.parse(p.read_text())
        trees[p] = t
        for n in t.body:
            tgt = (
                n.target
                if isinstance(n, ast.AnnAssign)
                else n.targets[0]
                if isinstance(n, ast.Assign)
                else None
            )
            if (
                isinstance(tgt, ast.Name)
                and n.value is not None
                and isinstance(n.value, (ast.Constant, ast.JoinedStr, ast.BinOp))
                and tgt.id.isupper()
            ):
                consts[tgt.id] = n.value
    for p, t in trees.items():
        for n in ast.walk(t):
            if not isinstance(n, ast.Call):
                continue
            f = n.func
            name = f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", None)
            rem = next((text_of(k.value, consts) for k in n.keywords if k.arg == "remedy"), "")
            m = str(p.relative_to(ROOT))
            if name in CLASSES and n.args:
                out.append(Message("error", name, text_of(n.args[0], consts), rem, m, n.lineno))
            elif name in ("Event", "of_error") and len(n.args) > 1 and not (isinstance(f, ast.Attribute)):
                out.append(
                    Message("event", text_of(n.args[0], consts), text_of(n.args[1], consts), "", m, n.lineno)
                )
            elif (
                isinstance(f, ast.Attribute)
                and isinstance(f.value, ast.Name)
                and f.value.id in ("Finding", "cls")
                and name in FACTORIES
                and len(n.args) > 1
            ):
                out.append(
                    Message(
                        "finding",
                        text_of(n.args[0], consts) + " " + FACTORIES[name],
                        text_of(n.args[1], consts),
                        rem or (text_of(n.args[2], consts) if len(n.args) > 2 else ""),
                        m,
                        n.lineno,
                    )
                )
            elif name in LINES and n.args:
                for a in n.args:
                    x = text_of(a, consts)
                    if " " in x:
                        out.append(Message("line", name, x, "", m, n.lineno))
            elif m.startswith("pipeline/") is None:
                pass
    return out


if __name__ == "__main__":
    import sys

    ms = scan()
    for m in ms:
        print(f"{m.module}:{m.line} [{m.kind} {m.name}] {m.text}" + (f"  >> {m.remedy}" if m.remedy else ""))
