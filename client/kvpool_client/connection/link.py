"""Link to the daemon: a background thread that notices when the daemon ends, and reconnects.

    CONNECTED ──socket hangs up / a request fails──► AWAY ──every RETRY_S──► CONNECTED (new epoch)
                                                     AWAY ──refused──► twice as long, REFUSED_RETRY_S_MAX at most
    any ──close──► CLOSED

The caller's threads never wait for the link: while the daemon is away, every call returns a miss at once. The link also renews
the leases of running loads, reports the Pool's counters at most once a second and when the process ends, logs when a session
ends and when the next one begins (`session_log`), and has what its owner leaves ended (`endings`). Lock: `_lock` guards the
session, the set of leases and when to renew them; it is never held across a connection attempt or a request.
"""

import atexit
import contextlib
import itertools
import os
import select
import threading
import weakref
from collections.abc import Callable

import numpy as np

from kvpool import failpoint
from kvpool.clock import Deadline, MonotonicClock
from kvpool.errors import KVPoolError, LayoutMismatch, Refused
from kvpool.keys import DEFAULT_DOMAIN
from kvpool.protocol import usage
from kvpool.protocol.records import messages as m
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.endings import Endings
from kvpool_client.connection.session import Session, SessionPlan
from kvpool_client.connection.session_log import SessionLog

RETRY_S = 0.1
# A daemon that refused this client will probably refuse it again.
REFUSED_RETRY_S_MAX = 5.0
# How long the link's thread waits for a welcome, where requests have less time. Many engines that start at once are welcomed in
# turn, and one that gives up stands at the end of the line again; nobody waits for this thread, and a daemon that ends or hangs
# up is noticed at once. Twice the time that a daemon gives a client for its hello by default (guess).
WELCOME_S = 10.0
REPORT_INTERVAL_S = 1.0
RENEW_FRACTION = 1 / 3


class Link:
    """Connection of one Pool, across restarts of the daemon."""

    def __init__(self, plan: SessionPlan, counters: Counters, *, logs_ends: bool = True) -> None:
        """Tries to connect once. `logs_ends`: False where a Pool has a link to the same daemon, which does. Raises
        LayoutMismatch if the daemon cannot take the layout; nothing else."""
        self._logs_ends = logs_ends
        self._plan = plan
        self._counters = counters
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connected = threading.Condition(self._lock)
        self._session: Session | None = None  # guarded by _lock
        self.domain = DEFAULT_DOMAIN  # of the last session, which roots keys; set before the session is
        self._leases_in_use: dict[int, int] = {}  # guarded by _lock
        self._renewal = Deadline(0.0)  # guarded by _lock
        self._report_pause = Deadline(0.0)
        self._is_closed = False
        self._retry_s = RETRY_S
        self._session_log = SessionLog(plan.path, MonotonicClock())
        self.reconnects = 0
        self.last_error = ""
        self._fault = ""  # why there is no session: of the last attempt, as long as there is none
        self._endings = Endings(lambda: self._wake(waits=False))
        self._expiries = Endings(self._wake)
        self.sources = itertools.count()  # numbers of the block pools that report over this link
        self.connected_listeners: list[Callable[[], None]] = []  # called on the link's thread; they must not wait
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._try_connect(plan.timeout_s)
            if self._session is None and logs_ends:
                self._session_log.note_absent(self._fault)
            self._thread = threading.Thread(target=self._run, name="kvpool-link", daemon=True)
            self._thread.start()
        except BaseException:  # another layout, or no thread is left
            if self._session is not None:
                self._session.end_session("the Pool was not made")
            self._close_pipe()
            raise
        _forget_in_children(self)
        self._at_exit = _report_at_exit(self)

    @property
    def session(self) -> Session | None:
        """The living session, or None while the daemon is away, after close, and in a forked child."""
        session = self._session
        return session if session is not None and session.is_alive else None

    @property
    def state(self) -> str:
        """Whether there is a session, for people; if there is none, why."""
        if self._is_closed:
            return "closed"
        if os.getpid() != self._pid:
            return "unusable in a forked child"
        session = self._session
        if session is not None and session.is_alive:
            return "connected"
        return f"away: {self._fault or (session.end_reason if session is not None else '')}"

    def wait_for_session(self, timeout_s: float) -> Session | None:
        """The living session, once there is one; None where there is none in time. For where a daemon has just taken over the
        memory of the one before, and lets this client in soon."""
        if os.getpid() != self._pid:
            return None  # its lock may have been held at the fork
        with self._connected:
            self._connected.wait_for(lambda: self.session is not None or self._is_closed, timeout_s)
        return self.session

    def lost(self) -> None:
        """Reconnect now: a request found that the session has ended."""
        self._wake()

    def note_failure(self, session: Session, error: KVPoolError) -> None:
        """Count a failed request of this session, and reconnect if the session has ended."""
        self._counters.count("failed_requests", 1)
        self.last_error = str(error)
        if not session.is_alive:
            self.lost()

    def use_lease(self, session: Session, lease_id: int, due: Deadline) -> None:
        """Renew this lease of the session until `unuse_lease`: a load of it begins. `due`: when first; a load that ends before
        costs no request."""
        due_s = due.remaining_s()
        with self._lock:
            if session is not self._session:
                return  # it has ended
            is_sooner = not self._leases_in_use or due_s < self._renewal.remaining_s()
            self._leases_in_use[lease_id] = self._leases_in_use.get(lease_id, 0) + 1
            if is_sooner:
                self._renewal = due
        if is_sooner and due_s < REPORT_INTERVAL_S:  # else the thread looks before
            self._wake()

    def unuse_lease(self, session: Session, lease_id: int) -> None:
        """Renew this lease of the session no longer: a load of it has ended."""
        with self._lock:
            if session is not self._session:
                return  # another one's leases have numbers of their own
            count = self._leases_in_use.get(lease_id, 0) - 1
            if count > 0:
                self._leases_in_use[lease_id] = count
            else:
                self._leases_in_use.pop(lease_id, None)

    def close(self) -> None:
        """End the session and the thread. Idempotent."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._wake()
        self._thread.join()
        with self._lock:
            session, self._session = self._session, None
            self._connected.notify_all()
        if session is not None:
            self._send_report(session)
            session.end_session("the Pool was closed")
        self._expiries.close()
        self._endings.close()
        self._close_pipe()

    def report_last(self) -> None:
        """Send what was counted since the last report, if that takes no wait: the process ends without `close`."""
        session = self.session
        if session is not None and not self._is_closed and os.getpid() == self._pid:
            with contextlib.suppress(KVPoolError):
                self._send_report(session)

    def abandon_in_child(self) -> None:
        """In a forked child: close the copy of the parent's socket."""
        session = self._session
        self._session = None
        if session is not None:
            session.abandon_in_child()

    def _run(self) -> None:
        while not self._is_closed:
            session = self.session
            self._endings.end_waiting()
            if session is None:
                self._note_away()
                self._wait(None, self._retry_s)
                if not self._is_closed:
                    with contextlib.suppress(LayoutMismatch):  # a daemon with a smaller arena: it may be replaced
                        self._try_connect(max(self._plan.timeout_s, WELCOME_S))
                continue
            if self._wait(session, min(self._pause_s(), session.reserved_saves.next_expiry_s())):
                session.end_session("the daemon closed it")
            elif session.index.is_taken_over:
                # A process that the ended daemon had forked may have the socket open still.
                session.end_session("another daemon has taken over its memory")
            else:
                self._renew(session)
                self._report(session)
                self._expire_saves(session)

    def _note_away(self) -> None:
        # A frame of its own, or the loop's would keep the ended session, and its memory mapped.
        ended = self._session
        if ended is not None and self._logs_ends:
            self._session_log.note_away(ended.end_reason)

    def _expire_saves(self, session: Session) -> None:
        # A frame of its own, or the loop's would keep the last save and its engine's memory.
        for save in session.reserved_saves.expired_saves():
            self._expiries.add_end(save.expire)
        self._expiries.end_waiting()

    def _try_connect(self, welcome_s: float) -> None:
        former = self._session
        if former is not None:
            former.end_session("another session takes its place")
            former.stop_saves()  # which another thread may be about to do: the hello says that none writes
        try:
            failpoint.reach("client.connect.before")
            session = Session(
                self._plan,
                on_end=self._wake,
                endings=self._endings,
                welcome_s=welcome_s,
                is_wanted=lambda: not self._is_closed,
                former=former,
            )
        except Refused as error:
            self.last_error = self._fault = str(error)
            is_leaving = error.code == "stopping"  # the next one may be there soon
            self._retry_s = RETRY_S if is_leaving else min(2 * self._retry_s, REFUSED_RETRY_S_MAX)
            if error.code == "layout":
                raise LayoutMismatch(str(error)) from error
            if not is_leaving:
                self._session_log.note_refused(self.last_error)
            return
        except (KVPoolError, OSError) as error:
            self.last_error = self._fault = str(error)
            self._retry_s = RETRY_S
            return
        self._retry_s, self._fault = RETRY_S, ""
        self.last_error = session.shortcoming or self.last_error
        if session.welcome.domain != self.domain:
            self.domain = session.welcome.domain
        with self._lock:
            previous, self._session = self._session, session
            self._leases_in_use.clear()
            self._connected.notify_all()
        if previous is not None:
            self.reconnects += 1
        self._session_log.note_begun()
        for listener in tuple(self.connected_listeners):
            listener()

    def _pause_s(self) -> float:
        """Seconds until there may be something to send. Counters are polled, so that counting wakes no thread."""
        with self._lock:
            return min(REPORT_INTERVAL_S, self._renewal.remaining_s() if self._leases_in_use else REPORT_INTERVAL_S)

    def _renew(self, session: Session) -> None:
        with self._lock:
            if not self._renewal.has_passed():
                return
            self._renewal = Deadline(session.welcome.lease_ttl_s * RENEW_FRACTION)
            leases = np.array(list(self._leases_in_use), dtype="<u8")
        with contextlib.suppress(KVPoolError):  # the next wait returns at once
            failpoint.reach("client.renew.before", failpoint.unreachable)
            for first in range(0, len(leases), m.RENEWALS_MAX):
                session.call(m.Renew(leases[first : first + m.RENEWALS_MAX].tobytes()), m.Done)

    def _report(self, session: Session) -> None:
        if session.send_waiting() and self._report_pause.has_passed() and self._send_report(session):
            self._report_pause = Deadline(REPORT_INTERVAL_S)

    def _send_report(self, session: Session) -> bool:
        counts = self._counters.take_unsent()
        if counts and not session.notify(m.Usage(usage.pack(counts))):
            self._counters.put_back(counts)
        return bool(counts)

    def _wait(self, session: Session | None, timeout_s: float) -> bool:
        """Wait until woken or the time is over. True: the session's socket has hung up."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        fd = session.fileno() if session is not None else -1
        if fd >= 0:
            poll.register(fd, select.POLLRDHUP)
        events = dict(poll.poll(timeout_s * 1000))
        if self._wake_read in events:
            with contextlib.suppress(BlockingIOError):  # another wake-up has emptied it
                os.read(self._wake_read, 4096)
        return bool(events.get(fd, 0) & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL))

    def _wake(self, *, waits: bool = True) -> None:
        """Wake the thread, also when the last caller has ended the session. `waits`: for the lock; without it the thread may
        only look at the end of its pause."""
        if waits:
            with self._lock:
                self._write_wake()
        elif self._lock.acquire(blocking=False):
            try:
                self._write_wake()
            finally:
                self._lock.release()

    def _write_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            if self._wake_write >= 0:
                os.write(self._wake_write, b"w")

    def _close_pipe(self) -> None:
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1


def _report_at_exit(link: Link) -> Callable[[], None]:
    """Have the link report at the interpreter's end, if it is alive then; what to unregister."""
    reference = weakref.ref(link)

    def report() -> None:
        living = reference()
        if living is not None:
            living.report_last()

    atexit.register(report)
    return report


def _forget_in_children(link: Link) -> None:
    """Have forked children close the link's socket, so that the daemon notices when the parent ends."""
    reference = weakref.ref(link)

    def abandon() -> None:
        living = reference()
        if living is not None:
            living.abandon_in_child()

    os.register_at_fork(after_in_child=abandon)
