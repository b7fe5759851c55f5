"""Input budget: memory of incomplete requests, over all connections.

A request is one frame of up to 1 MiB, and a client that sends a part of it and waits costs the daemon that part. Where more
than UNFINISHED_BYTES_MAX wait in all, the daemon ends the connection whose request is incomplete for the longest time: a
working client sends the rest in milliseconds.

Control thread only. Invariant: `_total` is the sum over `_waiting`, which is in the order in which requests began to wait.
"""

from collections.abc import Callable

from kvpool.ids import ConnectionId

UNFINISHED_BYTES_MAX = 64 << 20
# A connection's remainder below that costs what its socket costs.
COUNTED_BYTES = 16 << 10


class InputBudget:
    """Unfinished requests of one daemon. `end`: ends a connection that has waited for the longest time."""

    def __init__(self, end: Callable[[ConnectionId], None], bytes_max: int = UNFINISHED_BYTES_MAX) -> None:
        self._end = end
        self._bytes_max = bytes_max
        self._waiting: dict[ConnectionId, int] = {}
        self._total = 0

    def __repr__(self) -> str:
        return f"<InputBudget {self._total} of {self._bytes_max} bytes, {len(self._waiting)} connections>"

    def of(self, connection: ConnectionId) -> int:
        """Bytes of a connection's incomplete request, where they count."""
        return self._waiting.get(connection, 0)

    def note_unfinished(self, connection: ConnectionId, unfinished: int) -> None:
        """Set how many bytes of a connection's incomplete request have arrived."""
        if unfinished < COUNTED_BYTES:
            self._total -= self._waiting.pop(connection, 0)
            return
        self._total += unfinished - self._waiting.get(connection, 0)
        self._waiting[connection] = unfinished
        while self._total > self._bytes_max:
            oldest = next(iter(self._waiting))
            self._total -= self._waiting.pop(oldest)
            self._end(oldest)
