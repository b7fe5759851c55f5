"""Arrival watch: reports soon that bytes have come over one of many connections that somebody else reads.

An epoll of its own on duplicates of their descriptors, edge by edge. Bytes that were read at once may be missed: then nothing
waits. After an arrival a connection rests, longer where there are many, so that neither a flood nor a large fleet
costs many turns of the loop, and an idle connection none. Loop thread only.

Invariant: each watched descriptor is armed, or in `_resting`.
"""

import asyncio
import select
from collections.abc import Callable

_ARMED = select.EPOLLIN | select.EPOLLET | select.EPOLLONESHOT
# Arrivals that are reported in a turn of the loop.
REPORTED_AT_ONCE = 64
# After an arrival of a connection; and for each connection, so that 5000 arrivals a second are reported of all together.
REST_S, REST_OF_EACH_S = 0.002, 0.0002


class ArrivalWatch:
    """See the module. `on_arrival`: called with the descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_arrival: Callable[[int], None]) -> None:
        self._loop = loop
        self._on_arrival = on_arrival
        self._epoll = select.epoll()
        self._resting: set[int] = set()
        self._watched = 0
        self._next: asyncio.TimerHandle | None = None
        loop.add_reader(self._epoll.fileno(), self._report)

    def __repr__(self) -> str:
        return f"<ArrivalWatch {self._watched} watched, {len(self._resting)} resting>"

    def add_connection(self, descriptor: int) -> None:
        """Watch a connection. Raises OSError where the kernel has no room."""
        self._epoll.register(descriptor, _ARMED)
        self._watched += 1

    def remove(self, descriptor: int) -> None:
        """Watch it no more. To be called before its duplicate is closed: the kernel goes by the connection."""
        self._resting.discard(descriptor)
        self._epoll.unregister(descriptor)
        self._watched -= 1

    def close(self) -> None:
        """Watch nothing any more."""
        if self._epoll.closed:
            return
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        if self._next is not None:
            self._next.cancel()

    def _report(self) -> None:
        for descriptor, _ in self._epoll.poll(0, REPORTED_AT_ONCE):
            self._resting.add(descriptor)
            self._on_arrival(descriptor)
        if self._next is None and self._resting:
            self._next = self._loop.call_later(max(REST_S, REST_OF_EACH_S * self._watched), self._arm)

    def _arm(self) -> None:
        self._next = None
        resting, self._resting = self._resting, set()
        for descriptor in resting:
            self._epoll.modify(descriptor, _ARMED)
