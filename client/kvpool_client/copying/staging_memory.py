"""Staging memory of a session: saves write their bytes there when the daemon copies them into the arena itself.

Cut into windows, so that one can be filled while the daemon copies from another, and several saves can run at once. A window
belongs to its holder alone until it is given back. Any thread. Lock: `_lock` guards the free windows and is not held while
bytes move.
"""

import threading

import kvpool_native
from kvpool.ids import PAGE_BYTES

# Large enough that a request to the daemon is small beside the copy, small enough for several in the area: with 1 to 8 MiB a
# save takes a tenth to two thirds more CPU time on both sides, with 32 MiB as much (saves of 256 MiB in a bench daemon).
WINDOW_BYTES = 16 << 20


class StagingArea:
    """The windows of one mapping. Invariant: a window is in `_free` or has exactly one holder."""

    def __init__(self, mapping: kvpool_native.Mapping, layer_bytes: int) -> None:
        """Requires: a layer of a chunk fits the mapping."""
        assert layer_bytes <= mapping.size
        self.mapping = mapping
        wanted = max(WINDOW_BYTES, layer_bytes)
        windows = max(1, mapping.size // wanted, min(2, mapping.size // layer_bytes))
        self.window_bytes = max(layer_bytes, mapping.size // windows // PAGE_BYTES * PAGE_BYTES)
        self._lock = threading.Lock()
        self._is_free = threading.Condition(self._lock)
        self._free = [window * self.window_bytes for window in range(windows)]  # guarded by _lock

    def __repr__(self) -> str:
        return f"<StagingArea {len(self._free)} free windows of {self.window_bytes} bytes>"

    def take_window(self, timeout_s: float) -> int | None:
        """The offset of a window that is the caller's until it gives it back; None where none is free within the time."""
        with self._lock:
            if not self._is_free.wait_for(lambda: self._free, timeout_s):
                return None
            return self._free.pop()

    def give_back(self, offset: int) -> None:
        """Give a window back: nothing writes it or copies from it."""
        with self._lock:
            self._free.append(offset)
            self._is_free.notify()
