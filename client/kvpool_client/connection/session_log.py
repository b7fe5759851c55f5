"""Session log: one line in the engine's log when a Pool's session has ended, and one when the next one has begun.

    CONNECTED ──ended──► AWAY ──at most once in PAUSE_S──► LOGGED ──begun──► CONNECTED (logged)
                           └──begun──► CONNECTED (counted)

An end within PAUSE_S of the last logged one is logged when that time is over and the daemon is still away; one that came back
before is counted, and the next line has the number: a daemon that ends again and again does not fill the log. A first
connection that fails is logged like an end. Ends are warnings, begins are information. One thread at a time.
"""

import logging

from kvpool.clock import NS_PER_S, Clock, Deadline

log = logging.getLogger(__name__)

# Seldom enough for a log of days, often enough to be read as what goes on now (guess).
PAUSE_S = 60.0


class SessionLog:
    """See the module. Invariant: a begin is logged exactly where what it ends was."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._away_since_ns: int | None = None
        self._is_logged = False
        self._pause = Deadline(0.0, clock)
        self._unlogged = 0
        self._refusal = ""

    def __repr__(self) -> str:
        return (
            f"<SessionLog {'connected' if self._away_since_ns is None else 'away'}, {self._unlogged} ends not logged>"
        )

    def note_absent(self, reason: str) -> None:
        """The first connection has failed; of a refusal there is a line."""
        self._away_since_ns, self._is_logged = self._clock.now_ns(), True
        if not self._refusal:
            log.warning(
                "kvpool: not connected: %s; nothing is loaded or saved until a daemon serves %s: start kvpoold there, and this "
                "connects by itself, or name another socket (path of connect, or KVPOOL_SOCKET)",
                reason,
                self._path,
            )

    def note_refused(self, reason: str) -> None:
        """There is a daemon, which does not serve this client; called again while that is so."""
        if reason != self._refusal:
            self._refusal = reason
            log.warning("kvpool: the daemon at %s refuses this connection: %s", self._path, reason)

    def note_away(self, reason: str) -> None:
        """There is no session any more; called again while that is so."""
        if self._away_since_ns is None:
            self._away_since_ns, self._is_logged = self._clock.now_ns(), False
        if self._is_logged or not self._pause.has_passed():
            return
        more = f" ({self._unlogged} more since the last such line)" if self._unlogged else ""
        log.warning(
            "kvpool: the connection to the daemon at %s has ended: %s; nothing is loaded or saved until it is back%s",
            self._path,
            reason,
            more,
        )
        self._is_logged, self._unlogged, self._pause = True, 0, Deadline(PAUSE_S, self._clock)

    def note_begun(self) -> None:
        """There is a session."""
        since_ns, self._away_since_ns, self._refusal = self._away_since_ns, None, ""
        if since_ns is None:
            return
        if not self._is_logged:
            self._unlogged += 1
            return
        away_s = (self._clock.now_ns() - since_ns) / NS_PER_S
        log.info("kvpool: connected to the daemon at %s, after %.1f s without one", self._path, away_s)
