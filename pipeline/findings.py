"""The result of checking one precondition. ``preflight.checks`` returns a list of them. This is plain data; others
print it.

A failed finding carries the error class that a run raises if it cannot start because of it. That is
PreconditionMissing, unless a person needs to know more than that something is missing. It is PreconditionMissing also
for an error that occurred during a check: a server that is out of reach *before* anything began is not a connection
that broke.

What could not be checked is a finding, too, with the reason: a list without it would read as if all were well.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ExitStatus, PreconditionMissing, XidstreamError
from xidstream.pipeline.quantities import visible


class Status(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # the run works, but something in it will not be as expected
    FAILED = "failed"  # the run cannot start, or would stop
    NOT_CHECKED = "not checked"  # nobody can know it yet, or something else is missing first


MARKS: Final = {Status.OK: "ok", Status.WARNING: "warn", Status.FAILED: "FAIL", Status.NOT_CHECKED: "?"}
"""The mark before a finding's statement."""


@dataclass(frozen=True)
class Finding:
    """``check`` is a stable name (``wal_level``), ``statement`` is one line, and ``remedy`` is None if there is none.

    ``raises``: the error class that a run raises if the check failed. Otherwise it has no meaning.
    """

    check: str
    status: Status
    statement: str
    remedy: str | None = None
    raises: type[XidstreamError] = PreconditionMissing

    def __post_init__(self) -> None:
        object.__setattr__(self, "statement", visible(self.statement))
        object.__setattr__(self, "remedy", None if self.remedy is None else visible(self.remedy))

    @classmethod
    def ok(cls, check: str, statement: str) -> Finding:
        return cls(check, Status.OK, statement)

    @classmethod
    def warning(cls, check: str, statement: str, remedy: str) -> Finding:
        return cls(check, Status.WARNING, statement, remedy)

    @classmethod
    def failed(
        cls,
        check: str,
        statement: str,
        remedy: str,
        raises: type[XidstreamError] = PreconditionMissing,
    ) -> Finding:
        return cls(check, Status.FAILED, statement, remedy, raises)

    @classmethod
    def not_checked(cls, check: str, statement: str, remedy: str | None = None) -> Finding:
        """``statement`` names what is not known, and why."""
        return cls(check, Status.NOT_CHECKED, statement, remedy)

    @classmethod
    def of_error(cls, check: str, error: XidstreamError) -> Finding:
        """Keeps the error's class where that says more than that something failed."""
        failed = error.policy.exit_status is ExitStatus.FAILED
        return cls.failed(check, error.message, error.remedy, PreconditionMissing if failed else type(error))

    @property
    def text(self) -> str:
        """The statement, as it is printed after its mark."""
        return f"not checked: {self.statement}" if self.status is Status.NOT_CHECKED else self.statement

    def error(self) -> XidstreamError:
        """The error that a run raises because of a failed finding."""
        return self.raises(self.statement, remedy=self.remedy)


class Findings(list[Finding]):
    """A list whose ``repr`` is for people: an interactive session shows what `xidstream check` prints."""

    def __repr__(self) -> str:
        lines = []
        for finding in self:
            lines.append(f"{MARKS[finding.status]:<4}  {finding.text}")
            if finding.remedy and finding.status is not Status.OK:
                lines.append(f"      {finding.remedy}")
        return "\n".join(lines)


def enumerate_names(names: list[str], limit: int = 5) -> str:
    """``a, b, c and 4 more``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
