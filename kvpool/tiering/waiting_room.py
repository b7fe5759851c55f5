"""Waiting room: wakes requests that wait for memory when some may be free; they check again. Control thread only."""

import asyncio
import contextlib


class Room:
    """Requests that wait for memory which is being faulted in or demoted."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()

    def wake_requests(self) -> None:
        """Wake all requests: chunks or segments have moved."""
        self._moved.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until chunks have moved or the time is over."""
        self._moved.clear()
        with contextlib.suppress(asyncio.TimeoutError):  # the caller looks again either way
            await asyncio.wait_for(self._moved.wait(), timeout_s)
