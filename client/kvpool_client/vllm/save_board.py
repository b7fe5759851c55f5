"""Save board: shared memory that shows between steps whether a save thread of any rank reads blocks, and from when on none
will.

vLLM resets its prefix cache only while nobody holds a block, and asks for that between steps, when no report comes from the
workers. So the scheduler's half takes back all pins up to one, and waits until no thread of any rank reads.

    page of a rank:  u64 has attached │ u64 threads that read │ u64 pins taken back, up to this one (the scheduler's)

A thread first posts that it reads and then checks whether its pin was taken back. The scheduler's half first takes pins back,
waits for longer than a store takes to become visible, and then checks who reads. So a thread that is not seen reading sees that
its pin was taken back.
Invariant: after `take_back` has returned True, nothing reads a block of those pins. Threads: the first two words are the
rank's, its save threads take turns; the third the scheduler's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvpool.clock import Clock, Deadline
from kvpool.ids import PAGE_BYTES
from kvpool_client.engines.shared_bytes import SharedBytes

# Far longer than a store takes to become visible to other processors.
LOOK_S = 0.001
_HAS_ATTACHED, _READING, _TAKEN_BACK = range(3)


class SaveBoard:
    """The scheduler's side: the pages of all ranks."""

    def __init__(self, ranks: int) -> None:
        """Raises OSError."""
        self._memory = SharedBytes.create("kvpool-saves", ranks * PAGE_BYTES)
        self._words = _words(self._memory, ranks)

    @property
    def path(self) -> str:
        """The path by which a rank attaches."""
        return self._memory.path

    def take_back(self, pin: int, timeout_s: float, clock: Clock) -> bool:
        """Stop new reads for pins up to this one; whether all running reads ended within the time.

        False at once where a rank has not attached: its state is unknown.
        """
        if not self._words[:, _HAS_ATTACHED].all():
            return False
        self._words[:, _TAKEN_BACK] = pin
        deadline, nobody = Deadline(timeout_s, clock), threading.Event()
        nobody.wait(LOOK_S)
        while self._words[:, _READING].any():
            if deadline.has_passed():
                return False
            nobody.wait(LOOK_S)
        return True

    def close(self) -> None:
        """Close the descriptor."""
        self._memory.close()


class RankSaves:
    """A rank's side. Without `attach` it posts nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0  # guarded by _lock
        self._memory: SharedBytes | None = None
        self._page: npt.NDArray[np.uint64] | None = None

    @property
    def has_attached(self) -> bool:
        """Whether the scheduler's half sees this rank."""
        return self._page is not None

    def attach(self, path: str, rank: int) -> None:
        """Post there from now on. Raises OSError. Requires: no thread reads."""
        self._memory = SharedBytes.attach(path, (rank + 1) * PAGE_BYTES)
        self._page = _words(self._memory, rank + 1)[rank]
        self._page[_HAS_ATTACHED] = 1

    @contextmanager
    def reading(self, pin: int) -> Iterator[bool]:
        """Within the context, True: blocks of this pin may be read, because it was not taken back."""
        self._count(1)
        try:
            yield self._page is None or int(self._page[_TAKEN_BACK]) < pin
        finally:
            self._count(-1)

    def close(self) -> None:
        """Close the descriptor; what was mapped stays."""
        if self._memory is not None:
            self._memory.close()

    def _count(self, change: int) -> None:
        with self._lock:
            self._threads += change
            if self._page is not None:
                self._page[_READING] = self._threads


def _words(memory: SharedBytes, ranks: int) -> npt.NDArray[np.uint64]:
    return memory.view[: ranks * PAGE_BYTES].view(np.uint64).reshape(ranks, -1)
