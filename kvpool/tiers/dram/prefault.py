"""Pre-fault: background threads that fault in a DRAM tier's pages.

The first segment is faulted in before the daemon serves, so that it can store a chunk at once. The others follow, and each is
reported as soon as its slots may be used. A second round makes huge pages. The threads end when all is done, or at `stop`.

Owner: the control thread starts and stops it. `on_ready` is called on a pre-fault thread, once for each segment.
"""

import logging
import threading
from collections.abc import Callable

from kvpool.tiers.dram.tier import DramTier

log = logging.getLogger(__name__)


class Prefault:
    """The pre-fault threads of one tier. Invariant: each segment is reported at most once.

    `failure`: the error that ended a thread early; empty if there was none.
    """

    def __init__(self, tier: DramTier, threads: int, on_ready: Callable[[int], None]) -> None:
        assert threads > 0
        self._tier = tier
        self._on_ready = on_ready
        self.failure = ""
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvpool-prefault-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_working(self) -> bool:
        """Whether a thread is still working."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Finish the segments under way and end the threads. Idempotent."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                segment = self._tier.prefault_next()
                if segment is None:
                    break
                self._on_ready(segment)
            while not self._is_stopping.is_set() and self._tier.collapse_next() is not None:
                pass
        except OSError as error:
            # Out of memory: segments that are faulted in are used, the others never are.
            self.failure = str(error)
            log.error("pre-faulting the arena ends early: %s", error)
        except BaseException as error:
            self.failure = repr(error)
            raise
