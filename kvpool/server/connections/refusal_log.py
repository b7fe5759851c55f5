"""Refusal log: one line for each peer, code and minute of refused handshakes, with the number of repetitions.

A peer that retries without end would fill the log and take the control thread's time. A peer is a process; of more than
PEERS_MAX peers and codes in a minute the others share a line, since processes are cheap. `now_ns` comes from a clock of the
owner's.
Control thread only.

Invariant: `_counts` has at most PEERS_MAX + 1 rows, all of the current minute.
"""

import logging
from dataclasses import replace

from kvpool.clock import NS_PER_S, Clock
from kvpool.server.connections.local_socket import Peer

log = logging.getLogger(__name__)

MINUTE_NS = 60 * NS_PER_S
PEERS_MAX = 64
_OTHERS = Peer(0, 0, 0), "others"


class RefusalLog:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[tuple[Peer, str], int] = {}
        self._since_ns = clock.now_ns()

    def __repr__(self) -> str:
        return f"<RefusalLog of {len(self._counts)} peers and codes in this minute>"

    def note_refusal(self, peer: Peer, code: str, reason: str) -> None:
        """A handshake was refused, or failed."""
        now_ns = self._clock.now_ns()
        if now_ns - self._since_ns >= MINUTE_NS:
            self._sum_up()
            self._since_ns = now_ns
        key = (replace(peer, name=""), code)  # a process is one peer, whatever it is named
        if key not in self._counts and len(self._counts) >= PEERS_MAX:
            key = _OTHERS
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count > 1:
            return
        if key is _OTHERS:
            log.warning(
                "handshakes of more than %d peers were refused in this minute: the others are counted", PEERS_MAX
            )
        else:
            log.info("handshake refused: %s: %s: %s", peer, code, reason)

    def _sum_up(self) -> None:
        """Log how often the past minute's refusals were repeated."""
        for (peer, code), count in self._counts.items():
            if count > 1 and (peer, code) != _OTHERS:
                log.info("handshake refused: %s: %s: %d times more", peer, code, count - 1)
        if others := self._counts.get(_OTHERS):
            log.info("handshakes of further peers refused: %d", others)
        self._counts.clear()
