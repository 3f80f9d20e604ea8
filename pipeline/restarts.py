"""Whether a run begins another epoch when one has failed, after which pause, and when it gives up.

After an epoch that *worked*, the next pause is the shortest one again, and the run has all of ``GIVE_UP_AFTER_S``
again. An epoch worked if one of these is true:

- A batch went into the sink. If that happened in the moment before the driver died, nobody saw it. The next epoch then
  sees that the slot or the sink has moved. Without this rule, a run that makes progress between failures would
  end when one part after the other dies.
- It lasted for ``WORKED_AFTER_S``, because there may be nothing to deliver. This does not count between two storage
  faults in a row: a transaction larger than the disk fills the disk anew in every epoch, and would do so for ever.

A login that is refused is a mistake at the first start, and STOP. Once the server has let the run in, it is a password,
a certificate or a line of pg_hba.conf that changes at one end first: then it is tried again, for ``GIVE_UP_AFTER_S``,
whether or not an epoch worked (``POLICY``'s ``once_logged_in``).

The pauses grow, up to ``LONGEST_PAUSE_S``; while the server is away up to ``LONGEST_PAUSE_WITHOUT_SERVER_S`` alone.
An epoch that finds no server costs a process and no session, and a promoted standby waits for its reader: a failover is
meant to be over in seconds.

This is plain state over the caller's clock. The supervisor waits and reports.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.errors import (
    Action,
    ConnectionLost,
    LoginRefused,
    PasswordCommandFailed,
    StorageFault,
    XidstreamError,
)
from xidstream.pipeline.pg import Lsn

GIVE_UP_AFTER_S: Final = 300.0
GIVE_UP_BEFORE_ANY_WORKED_S: Final = 20.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 15.0
LONGEST_PAUSE_WITHOUT_SERVER_S: Final = 4.0
WORKED_AFTER_S: Final = 2 * LONGEST_PAUSE_S
_LOGIN_FAILURES: Final = (LoginRefused, PasswordCommandFailed)


class Restarts:
    """The state of one run. Call ``begin`` for each epoch, and ``pause_after`` for each epoch that failed."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        """The next pause. It doubles with each failure, and begins anew when an epoch has worked."""
        self._failing_since_s: float | None = None
        """The first failure since an epoch worked, on the monotonic clock; None: nothing has failed."""
        self._any_worked = False
        """Whether any epoch of this run has worked: then it is patient."""
        self._storage_failed = False
        """Whether the epoch before ended with StorageFault."""
        self._reached: dict[str, Lsn] = {}
        """How far slot and sink have ever been seen."""
        self._earlier_worked = False
        """Whether this epoch has found slot or sink further than before: the one before it worked."""
        self.has_logged_in = False
        """Whether the server has let the run in, in any epoch."""
        self.took_batch = False
        """Whether the sink has taken a batch in this epoch."""

    def begin(self) -> None:
        self.took_batch = self._earlier_worked = False

    def action_of(self, error: XidstreamError) -> Action:
        return error.policy.action_of(logged_in=self.has_logged_in)

    def is_rotation(self, error: XidstreamError) -> bool:
        """Whether a login fails that worked before in this run."""
        return self.has_logged_in and isinstance(error, _LOGIN_FAILURES)

    def reached(self, where: str, lsn: Lsn) -> None:
        """Note how far the slot or the sink (``where``) is; 0/0 if it does not say."""
        if where in self._reached and lsn > self._reached[where]:
            self._earlier_worked = True
        if lsn or where in self._reached:
            self._reached[where] = max(lsn, self._reached.get(where, lsn))

    def pause_after(self, error: XidstreamError, now_s: float, reading_s: float | None) -> float | None:
        """Seconds to wait before the next epoch; None to give up. ``reading_s``: how long the failed epoch has read."""
        if self._worked(error, reading_s):
            self._any_worked = True
            self._pause_s, self._failing_since_s = FIRST_PAUSE_S, None
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        # A run that never worked gives up soon, so that the user sees why.
        is_patient = self._any_worked or self.is_rotation(error)
        limit_s = GIVE_UP_AFTER_S if is_patient else GIVE_UP_BEFORE_ANY_WORKED_S
        if now_s - self._failing_since_s >= limit_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        without_server = isinstance(error, (ConnectionLost, *_LOGIN_FAILURES))
        return min(pause_s, LONGEST_PAUSE_WITHOUT_SERVER_S) if without_server else pause_s

    def _worked(self, error: XidstreamError, reading_s: float | None) -> bool:
        after_fault, self._storage_failed = self._storage_failed, isinstance(error, StorageFault)
        if self._earlier_worked or self.took_batch:
            return True
        if after_fault and self._storage_failed:
            return False
        return reading_s is not None and reading_s > WORKED_AFTER_S
