"""Waiting room: requests that wait for memory are woken when some may be free, and check again. Control thread only."""

import asyncio
import contextlib


class Room:
    """Those who wait for memory that is being faulted in or written down."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()

    def note(self) -> None:
        """Something has moved: whoever waits looks again."""
        self._moved.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until chunks have moved or the time is over."""
        self._moved.clear()
        with contextlib.suppress(asyncio.TimeoutError):  # the caller looks again either way
            await asyncio.wait_for(self._moved.wait(), timeout_s)
