"""Bad chunk log: chunks of one tier that do not have the bytes they were stored with, in one line a minute.

One bad file has thousands of bad chunks, and each of them would be a line. The first is logged at once, with its place and key;
further ones are counted, and a minute later one line has their number and the latest of them.

    first ──logged──► a minute ──further ones──► their number and the latest, logged ──► another minute
                         └──none──► the next one is a first one

Control thread only, in a running event loop.
"""

import asyncio
import logging

from kvpool.clock import Clock
from kvpool.key_column import SHOWN_DIGITS
from kvpool.log_pace import LogPace

log = logging.getLogger(__name__)


class BadChunkLog:
    """See the module. Invariant: while chunks are counted and not logged, a line about them is scheduled."""

    def __init__(self, tier: str, clock: Clock) -> None:
        """`tier`: the name of the tier that has the chunks."""
        self._tier = tier
        self._pace = LogPace(clock)
        self._unlogged = 0
        self._latest = ""
        self._line: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BadChunkLog of {self._tier}, {self._unlogged} to be logged>"

    def note_bad_chunk(self, key: bytes, fault: str, place: str) -> None:
        """A chunk was found bad. `fault`: what is wrong; `place`: where it lies: a file and an offset, or an address."""
        latest = f"chunk {key.hex()[:SHOWN_DIGITS]} at {place}: {fault}"
        if not self._unlogged and self._pace.take_line() is not None:
            log.error("a chunk is bad in the %s tier, and no engine gets it: %s", self._tier, latest)
            return
        self._unlogged, self._latest = self._unlogged + 1, latest
        if self._line is None:
            self._line = asyncio.get_running_loop().call_later(self._pace.wait_s, self._log_unlogged)

    def close(self) -> None:
        """Log what is not logged yet."""
        if self._line is not None:
            self._line.cancel()
            self._log_unlogged()

    def _log_unlogged(self) -> None:
        self._pace.take_line()  # this line has a minute of its own
        log.error(
            "%d more chunks were bad in the %s tier, and no engine gets them, the latest: %s",
            self._unlogged,
            self._tier,
            self._latest,
        )
        self._unlogged, self._line = 0, None
