"""What kind of value a setting takes, whoever gives it: a TOML file, the command line, a script.

A file may hold anything that TOML can say, and a script anything at all. So each value is looked at once, as a
``Config`` is made, before any other rule: those may then rely on its type. A wrong one is a ConfigError with the
setting's name. The value itself is shown only if it is a number, because a text may hold a secret.

Text is UTF-8 without NUL, since it ends up in paths, in a libpq string, in the arguments of a JVM: there a NUL ends it,
or is an error without a name.

Called by ``config``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from xidstream.pipeline.errors import ConfigError

_WORDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "str": ((str,), "a string"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((str, list, tuple), "a string or a list of strings"),
    "Mapping[str, str]": ((Mapping,), "a table of Spark's settings"),
}
"""Declared type of a field of ``Config`` → what may be given, and how that is told."""
_BITS: Final = 63
"""TOML's integers, and PostgreSQL's. Python cannot write all larger ones."""
_NO_TEXT: Final = re.compile(r"[\x00\ud800-\udfff]")
_NO_KEY: Final = re.compile(r"[\x00-\x20\x7f-\xa0=\ud800-\udfff]")
_NO_VALUE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""A tab and a line break may be in a value: many Java options are written over several lines."""


def check_type(name: str, declared: str, value: Any, with_unit: str | None = None) -> None:
    """Raise ConfigError unless a value fits the field of ``Config`` that has this declared type.

    ``with_unit``: it may be a text with a unit, which is told by this example."""
    plain = declared.removesuffix(" | None")
    if value is None and plain != declared:
        return
    types, words = _WORDS[plain]
    if with_unit is not None:
        types, words = (*types, str), with_unit
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        shown = f"{value!r}" if isinstance(value, (bool, float)) else type(value).__name__
        raise ConfigError(f"{name} must be {words}, got {shown}")
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ConfigError(f"{name} must be {words}, and this one has more than {_BITS} bits")
    if isinstance(value, (str, list, tuple)):
        for text in [value] if isinstance(value, str) else value:
            if not isinstance(text, str):
                raise ConfigError(f"{name} must be {words}, got {type(text).__name__} in it")
            if _NO_TEXT.search(text):
                raise ConfigError(f"{name} must be text in UTF-8, without NUL")


def spark_settings(given: Mapping[Any, Any]) -> dict[str, str]:
    """``[spark_conf]`` as Spark takes it. Raises ConfigError for what would not arrive there as it is written.

    They are arguments of the JVM (``--conf KEY=VALUE``), so ``=`` in a key would cut it in the wrong place. TOML reads
    a key with dots and no quotes as tables in each other. Numbers, true and false are written as text.
    """
    found = {}
    for key, value in given.items():
        if not isinstance(key, str) or not key or _NO_KEY.search(key):
            raise ConfigError(
                f"spark_conf: {key!r} is no name of a setting of Spark",
                remedy='use names without spaces, = and control characters, such as "spark.ui.enabled"',
            )
        if isinstance(value, Mapping):
            raise ConfigError(
                f"spark_conf: {key} is a table, and not a setting's value",
                remedy='put the whole name between quotes: "spark.ui.enabled" = "true"',
            )
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, (int, float)):
            check_type(f"spark_conf: {key}", "float", value)
            value = str(value)
        if not isinstance(value, str) or _NO_VALUE.search(value):
            raise ConfigError(
                f"spark_conf: the value of {key} is no text in UTF-8, or has a control character in it",
                remedy='write it as a string: "spark.ui.enabled" = "true"',
            )
        found[key] = value
    return found
