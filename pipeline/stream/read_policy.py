"""When the reader reads, cuts, rests, and speaks to the server: decided from the clock and from sums of bytes.

The reader's loop reads what the server has sent and then asks here what to do. It gets actions, performs them in the
order given, and decides nothing itself. The rules:

- *Credit.* While too many bytes are under way, nothing is read. A pause stops reading, never the connection: the
  status updates go on. Where nothing is in flight, what is over the limit is gathered in the cutter, and only cutting
  it can bring credit back.
- *Rests.* While rows flow the reader naps instead of polling: a walsender sends each row by itself, and a reader that
  polls is woken for each, which costs both of them more than the row does. Naps double while rows flow. Where nothing
  flows, the reader waits for the socket.
- *Looks.* The socket is empty every few hundred rows. What is not done for each row is therefore done by the clock.
- *Lingering.* ``Linger`` says when what was gathered is cut.
- *Status.* ``StatusPace`` says when the server is told the position. The server is also asked where it is, at each
  ``status_interval_s``: an idle publication must not hold WAL back. A server that writes much is asked four times a
  second. It says where it is by itself only when it has decoded all there is, which may not be for many seconds.
- *Silence.* A link that only one side has lost stays open. A server that was asked, and sent nothing for
  ``receive_timeout_ms``, counts as lost.
- *Positions.* The server sends keepalives as often as it likes; a position goes to the sequencer at a bounded rate.

An example over TCP, with rows that come one by one: the naps are 0.3, 0.6, 1.2 and 2.4 ms, and then 4 ms each. The
looks, which come every 10 ms, lie in between. A read that brings nothing makes the next nap 0.3 ms again, and waits for
the socket until the next look, for 2 ms at most where nothing flowed at the last one.

An example of credit, with the default limits of 64 MiB (``reader_memory_bytes``) and 128 MiB (``backlog_bytes``), in
MiB. Queued bytes count twice, because it is not known yet whether they are of transactions that have ended::

    pending  in flight  of them queued  backlog    what reading waits for
    10       50         20              100        nothing: 60 and 120
    10       55         20              100        reader_memory_bytes: 65
    10       50         30              100        backlog_bytes: 130

Times are monotonic, in seconds. The reading thread calls everything but ``position_changed``, which may come from any
thread.

Rejected: one record of all sums for each question. Whether open transactions have rows costs a walk over all of them,
which is affordable for a look and not for a read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream.linger import Linger
from xidstream.pipeline.stream.status_pace import StatusPace

NAPS_S: Final = (0.0003, 0.004)
SOCKET_NAPS_S: Final = (0.0001, 0.0001)
"""While rows flow: the first nap and the longest. A Unix socket takes about 280 rows that were sent one by one, which
come in half a millisecond, and then the walsender waits. TCP joins them, and takes megabytes; there long naps spare the
walsender a good part of its work, too (docs/performance.md)."""
IDLE_WAIT_S: Final = 0.05
LOOK_INTERVAL_S: Final = 0.002
FLOWING_LOOK_INTERVAL_S: Final = 0.01
POSITION_INTERVAL_S: Final = 0.25
"""How often the server is asked where it is, by a run that waits for nothing else."""
BUSY_ASK_INTERVAL_S: Final = 0.25
BUSY_BYTES: Final = 1 << 20
"""A server that has moved so far since it was asked is asked again soon: one that writes 100 MB/s every 25 MB. One that
is asked each ten seconds alone writes less than 40 MB in them."""


class ReadStep(enum.Enum):
    """An action without a number."""

    CUT_WHOLE = "cut the whole transactions that were gathered"
    CUT_OPEN = "cut the rows of open transactions that were gathered"
    PASS_POSITION = "pass on the position of the keepalive"
    SEND_STATUS = "send a status"
    ASK_POSITION = "send a status that asks for an answer"


@dataclass(frozen=True, slots=True)
class Nap:
    """Sleep, whatever comes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the socket has something, at most so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """Wait as above, and say how it ended: ``listened`` is called next."""

    seconds: float


@dataclass(frozen=True, slots=True)
class AwaitCredit:
    """Wait until credit may have come back, at most so long."""

    seconds: float


Action = ReadStep | Nap | Wait | Listen | AwaitCredit


@dataclass(frozen=True, slots=True)
class Credit:
    """Raw bytes under way. ``pending_bytes``: gathered and not cut; ``in_flight_bytes``: cut and not decoded;
    ``queued_bytes``: those of them that are not sent yet; ``backlog_bytes``: sent, ended, and not in the sink."""

    pending_bytes: int
    in_flight_bytes: int
    queued_bytes: int
    backlog_bytes: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """The bytes that wait in the cutter: ``whole_bytes`` of small transactions, and perhaps rows of open ones; and the
    bytes that were cut and sent since the start."""

    whole_bytes: int
    has_open_rows: bool
    cut_bytes: int
    sent_bytes: int


class ReadPolicy:
    """``status_interval_s``: the longest silence towards the server; ``is_local``: the link is a Unix socket."""

    def __init__(self, config: Config, now_s: float, *, status_interval_s: float, is_local: bool) -> None:
        self._slot = config.slot
        self._reader_memory_bytes = config.reader_memory_bytes
        self._backlog_limit_bytes = config.backlog_bytes
        self._linger_s = config.linger_ms / 1000
        self._linger = Linger(linger_s=self._linger_s, stream_linger_s=config.stream_linger_ms / 1000)
        """When what was gathered is cut."""
        self._pace = StatusPace(status_interval_s, now_s)
        """When the server is told the position."""
        self._ask_interval_s = POSITION_INTERVAL_S if config.available_now else status_interval_s
        """How long a silent server is left alone before it is asked where it is."""
        self._silence_limit_s: float | None = None
        """How long a server that was asked may be silent; None: for ever."""
        if config.receive_timeout_ms:
            self._silence_limit_s = config.receive_timeout_ms / 1000
        self._naps_s = SOCKET_NAPS_S if is_local else NAPS_S
        """The shortest and the longest nap."""
        self._nap_s = self._naps_s[0]
        """The next nap, if rows flow."""
        self._is_quiet = False
        """Whether nothing has come since the last look."""
        self._next_look_s = self._next_ask_s = self._next_position_s = now_s
        """When the next look, the next question, and the next position are due."""
        self._server_lsn = self._asked_at_lsn = INVALID_LSN
        """Where the server has said that it is; where it was when it was asked last."""
        self._asked_s: float | None = None
        """When the server was asked what it has not answered yet; None where nothing is open."""

    # -- credit ----------------------------------------------------------------------------------------

    def is_over_credit(self, credit: Credit) -> bool:
        """Whether nothing more may be read now."""
        return self.exceeded(credit) is not None

    def exceeded(self, credit: Credit) -> str | None:
        """The setting whose limit is reached, so that nothing more may be read now; None if there is none."""
        if credit.in_flight_bytes + credit.pending_bytes > self._reader_memory_bytes:
            return "reader_memory_bytes"
        # What is queued may have ended: that is known when it is sent.
        if credit.backlog_bytes + credit.queued_bytes > self._backlog_limit_bytes:
            return "backlog_bytes"
        return None

    def pause(self, now_s: float, in_flight_bytes: int) -> tuple[Action, ...]:
        """The actions in place of reading, as long as it is over credit."""
        self._asked_s = None  # nobody listens, so silence means nothing
        actions: list[Action] = []
        if not in_flight_bytes:
            actions += [ReadStep.CUT_WHOLE, ReadStep.CUT_OPEN]
        if self._pace.is_due(now_s):
            actions.append(ReadStep.SEND_STATUS)
        return (*actions, AwaitCredit(IDLE_WAIT_S))

    # -- after each read -------------------------------------------------------------------------------

    def rest(self, now_s: float, *, drained: bool, flowing: bool) -> tuple[Action, ...] | None:
        """The actions until the next look; None where it is due now, and ``look`` must follow.

        ``drained``: the socket had no more; ``flowing``: the read has brought something.
        """
        if flowing:
            self._asked_s = None
        else:
            self._nap_s = self._naps_s[0]
        if now_s >= self._next_look_s:
            return None
        if not drained:
            return ()
        if not flowing:
            return (Wait(self._next_look_s - now_s),)
        nap = Nap(self._nap_s)
        self._nap_s = min(2 * self._nap_s, self._naps_s[1])
        return (nap,)

    def look(self, now_s: float, gathered: Gathered, *, drained: bool, flowing: bool) -> tuple[Action, ...]:
        """The actions that are due by the clock, not for each read."""
        self._next_look_s = now_s + (FLOWING_LOOK_INTERVAL_S if flowing else LOOK_INTERVAL_S)
        self._is_quiet = self._is_quiet and drained
        actions: list[Action] = []
        whole_bytes = gathered.whole_bytes
        if self._linger.whole_is_due(
            now_s,
            whole_bytes,
            quiet=self._is_quiet,
            cut_bytes=gathered.cut_bytes,
            sent_bytes=gathered.sent_bytes,
        ):
            actions.append(ReadStep.CUT_WHOLE)
            whole_bytes = 0
        if self._linger.open_is_due(now_s, gathered.has_open_rows):
            actions.append(ReadStep.CUT_OPEN)
        if self._pace.is_due(now_s):
            actions.append(ReadStep.SEND_STATUS)
        if not drained:
            return tuple(actions)
        if now_s >= self._next_ask_s:
            self._next_ask_s = now_s + self._ask_interval_s
            self._asked_at_lsn = self._server_lsn
            self._asked_s = now_s if self._asked_s is None else self._asked_s
            actions.append(ReadStep.ASK_POSITION)
        wait_s = min(IDLE_WAIT_S, self._linger_s) if whole_bytes else IDLE_WAIT_S
        return (*actions, Listen(wait_s))

    def listened(self, now_s: float, *, heard: bool) -> None:
        """How ``Listen`` ended. Raises ConnectionLost where the server was silent for too long, though it was asked."""
        self._is_quiet = not heard
        if heard or self._asked_s is None or self._silence_limit_s is None:
            return
        if now_s - self._asked_s > self._silence_limit_s:
            raise ConnectionLost(
                f"slot {self._slot}: the server was silent for {self._silence_limit_s:.0f} s, though it was asked",
                remedy="check the network in between; raise receive_timeout_ms where the server is that slow",
            )

    # -- positions and the status ----------------------------------------------------------------------

    def keepalive(self, now_s: float, server_lsn: Lsn, *, reply_requested: bool) -> tuple[Action, ...]:
        """The server has said where it is."""
        actions: list[Action] = []
        self._server_lsn = max(server_lsn, self._server_lsn)
        if self._server_lsn - self._asked_at_lsn >= BUSY_BYTES:
            self._next_ask_s = min(self._next_ask_s, now_s + BUSY_ASK_INTERVAL_S)
        if now_s >= self._next_position_s:
            self._next_position_s = now_s + POSITION_INTERVAL_S / 2
            actions.append(ReadStep.PASS_POSITION)
        if reply_requested:
            self._pace.asked()
            if self._pace.is_due(now_s):
                actions.append(ReadStep.SEND_STATUS)
        return tuple(actions)

    def position_changed(self) -> None:
        """There is a new position to confirm. Set it first: the mark is cleared before the position is read."""
        self._pace.changed()

    def sending_status(self) -> None:
        """The position is read next."""
        self._pace.sending()

    def status_sent(self, now_s: float, *, taken: bool) -> None:
        """``taken``: False where the server still has not taken an earlier one, and this one was dropped."""
        self._pace.sent(now_s, taken=taken)
