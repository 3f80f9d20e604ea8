"""The lists of docs/messages.md, read from the sources: ``make docs`` writes them, a test compares them.

A text that a person sees is an argument of few calls: a class of ``pipeline.errors``, ``Event``, ``Finding``,
``Stall``, and what prints a line. So the lists are read by ``ast``, with nothing imported or run. The page is ordered
by kind, and within it by words, because a person has the words and not the module. What is put in is ``{name}``;
``[a|b]`` is one of both. A text that is put together elsewhere stays a ``{name}``. The phrases of the status page and
of `xidstream status` are listed as they are in their sources.

Rejected: the module and line of each message, which would change the page with each edit of any module.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.settings_table import BEGIN, END
from xidstream.pipeline import errors
from xidstream.pipeline.errors import POLICY, XidstreamError
from xidstream.pipeline.findings import MARKS, Status

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "messages.md"
CLASSES: Final = {
    name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, XidstreamError)
}
_FINDINGS: Final = {
    "ok": MARKS[Status.OK],
    "warning": MARKS[Status.WARNING],
    "failed": MARKS[Status.FAILED],
    "not_checked": MARKS[Status.NOT_CHECKED],
}
_LINES: Final = {"echo", "line", "tell", "_tell", "_say", "print"}
_PHRASES: Final = ("actors/cli/status_view.py", "actors/cli/display.py")
_SCRIPT: Final = ROOT / "actors/status/page/status.js"
_FEWEST_WORDS: Final = 2
_LONGEST: Final = 300
_WORD: Final = re.compile(r"[A-Za-z]{2,}")
_Known = Mapping[str, list[ast.expr]]


class Message(NamedTuple):
    """``group``: the class of an error, the name of an event, the mark of a finding; else empty."""

    kind: str
    group: str
    text: str
    remedy: str = ""


def messages() -> set[Message]:
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in ("pipeline", "actors")
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    own = {name: _constants(tree) for name, tree in trees.items()}
    names = Counter(constant for constants in own.values() for constant in constants)
    shared = {n: v for constants in own.values() for n, v in constants.items() if names[n] == 1}
    found = {_tidy(m) for name, tree in trees.items() for m in _of_block(tree, {**shared, **own[name]})}
    found |= {_tidy(Message("phrase", "", text)) for name in _PHRASES for text in _phrases(trees[name])}
    found |= {_tidy(Message("phrase", "", text)) for text in _script_phrases()}
    return {message for message in found if _is_text(message.text)}


def _constants(tree: ast.Module) -> dict[str, list[ast.expr]]:
    return {name: values for name, values in _assigned(tree.body).items() if name.lstrip("_").isupper()}


def _of_block(block: ast.AST, known: _Known) -> Iterator[Message]:
    """The messages of a module or function. ``known``: what names stand for there."""
    for node in ast.iter_child_nodes(block):
        inner = known
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = {**known, **_assigned(ast.walk(node))}
        if isinstance(node, ast.Call):
            yield from _of_call(node, inner)
        yield from _of_block(node, inner)


def _of_call(call: ast.Call, known: _Known) -> Iterator[Message]:
    function, arguments = call.func, call.args
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = getattr(getattr(function, "value", None), "id", "")
    texts = [_text(argument, known) for argument in arguments]
    remedy = next((_text(k.value, known) for k in call.keywords if k.arg == "remedy"), "")
    if name in CLASSES and texts:
        yield Message("error", name, texts[0], remedy)
    elif name in ("Event", "of_error") and owner != "Finding" and len(texts) > 1:
        yield Message("event", texts[0], texts[1])
    elif name == "Stall" and len(texts) > 3:
        yield Message("stall", "", texts[3])
    elif name in _FINDINGS and owner in ("Finding", "cls") and len(texts) > 1:
        yield Message("finding", _FINDINGS[name], texts[1], remedy or "".join(texts[2:3]))
    elif name in _LINES:
        yield from (Message("line", "", text) for text in texts)


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Name → the texts that are assigned to it. A name that may be something else is not among them."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and value is not None:
            pairs = [(target, value) for target in targets]
            if isinstance(targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(targets[0].elts, value.elts, strict=False))
            for target, each in pairs:
                if isinstance(target, ast.Name):
                    found[target.id].append(each)
    is_text = (ast.JoinedStr, ast.Constant, ast.BinOp, ast.IfExp)
    return {name: values for name, values in found.items() if all(isinstance(v, is_text) for v in values)}


def _text(node: ast.expr, known: _Known, depth: int = 0) -> str:
    def inner(each: ast.expr) -> str:
        return _text(each, known, depth + 1)

    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else "{n}"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(inner, node.values))
    if isinstance(node, ast.FormattedValue):
        return inner(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return inner(node.left) + inner(node.right)
    if isinstance(node, ast.IfExp):
        return _one_of([inner(node.body), inner(node.orelse)])
    if isinstance(node, ast.Name) and node.id in known and depth < 5:
        text = _one_of([inner(value) for value in known[node.id]])
        if len(text) <= _LONGEST:
            return text
    if isinstance(node, ast.Call) and _called(node) in ("counted", "waiting") and len(node.args) == 2:
        return "{n} " + inner(node.args[1]) + ("(s)" if _called(node) == "counted" else "(s) wait")
    return "{" + _name(node) + "}"


def _one_of(texts: list[str]) -> str:
    some = list(dict.fromkeys(text for text in texts if text))
    return some[0] if len(some) == 1 and len(texts) == 1 else f"[{'|'.join(some)}]" if some else ""


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _name(node: ast.AST) -> str:
    """The word for a value: its attribute's or variable's, of a call that of its argument."""
    if isinstance(node, ast.Attribute) and node.attr != "__name__":
        return node.attr.lstrip("_")
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else _called(node)
    return next((_name(n) for n in ast.iter_child_nodes(node) if not isinstance(n, ast.operator)), "n")


def _phrases(tree: ast.Module) -> Iterator[str]:
    """The texts of a module that shows an account; its docstrings are none."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if id(node) not in skipped and isinstance(node, (ast.JoinedStr, ast.Constant)):
            skipped.update(map(id, ast.walk(node)))
            yield _text(node, {})


def _script_phrases() -> Iterator[str]:
    """The texts of the page's script, between back ticks or quotes; the innermost, where one holds others."""
    for line in _SCRIPT.read_text(encoding="utf-8").splitlines():
        code = line.split("// ")[0]
        for text in re.findall(r'`([^`"]*)`|"([^"`]*)"', code):
            shown = re.sub(
                r"\$\{(?:\w+\()?([\w.]*)[^}]*\}", lambda m: "{" + m[1].split(".")[-1] + "}", "".join(text)
            )
            # A name of a style or an attribute has two words at most.
            if len(shown.split()) > _FEWEST_WORDS and not re.search(r"[=;?$<>]", shown):
                yield shown


def _is_text(text: str) -> bool:
    """Whether it has words of its own, and is no style of ``rich``."""
    words = set(_WORD.findall(re.sub(r"\{[^{}]*\}", "", text)))
    return len(words) >= _FEWEST_WORDS and not text.startswith("bold ")


def _tidy(message: Message) -> Message:
    unmarked = (part.replace("[bold]", "").replace("[/]", "") for part in (message.text, message.remedy))
    text, remedy = (" ".join(part.split()) for part in unmarked)
    return message._replace(text=text, remedy=remedy)


def lists() -> str:
    kinds: dict[str, dict[str, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for message in sorted(messages(), key=lambda m: (m.text.lstrip("{[").lower(), m)):
        kinds[message.kind][message.group].append(message)
    parts = ["## Errors\n"]
    for name, found in sorted(kinds["error"].items()):
        policy = next(POLICY[cls] for cls in CLASSES[name].__mro__ if cls in POLICY)
        facts = f"Action: {policy.action.value}. Exit status: {int(policy.exit_status)}."
        parts += [
            f"### {name}\n",
            f"{facts} Remedy, where a message has none of its own: `` {policy.remedy} ``.\n",
            _list(found),
        ]
    parts.append("## Events\n")
    for name, found in sorted(kinds["event"].items()):
        parts += [f"### {name}\n", _list(found)]
    parts += ["## What a stalled part waits for\n", _list(kinds["stall"][""])]
    parts.append("## Findings of check\n")
    for mark, found in kinds["finding"].items():
        parts += [f"### {mark}\n", _list(found)]
    parts += ["## Lines of commands\n", _list(kinds["line"][""])]
    parts += ["## Phrases of the status page and of status\n", _list(kinds["phrase"][""])]
    return "\n".join(parts)


def _list(found: Iterable[Message]) -> str:
    return "".join(
        f"- `` {message.text} ``" + (f" Remedy: `` {message.remedy} ``" if message.remedy else "") + "\n"
        for message in found
    )


def page_with_lists(page: str) -> str:
    """The page with its lists renewed. ValueError where the marks are missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
