"""Staging ring of a device: memory used piece by piece, through which every load and save of a Pool goes.

Memory on a device belongs to the engine: the pool's part is bounded and allocated once, for any length of prompts and any
number of loads. Copies queued on one stream use a piece; a later user of the same bytes on another stream waits for them on the
device, not on the host.

Threads: the one that holds `lock`, from taking a piece until it gives it back; it never waits meanwhile.
"""

import threading
from collections import deque
from typing import Any

# Two pieces of 32 MiB: while one crosses the bus the other is scattered. A larger ring gains nothing, a smaller one makes more
# calls (a guess).
RING_BYTES = 64 << 20
ALIGNMENT = 512


class StagingRing:
    """See the module. Invariant: `_under_way` has the pieces whose events may be outstanding, oldest first."""

    def __init__(self, torch_module: Any, device: Any, layer_bytes: int) -> None:
        """`layer_bytes`: the least that a piece may need. Takes the memory."""
        self.size = max(RING_BYTES, layer_bytes)
        self.piece_bytes = max(self.size // 2, layer_bytes)
        self.memory = torch_module.empty(self.size, dtype=torch_module.uint8, device=device)
        self.lock = threading.Lock()
        self._at = 0  # guarded by lock
        self._under_way: deque[tuple[int, int, Any, Any]] = deque()  # guarded by lock: from, to, stream, event

    def __repr__(self) -> str:
        return f"<StagingRing {self.size} bytes, {len(self._under_way)} pieces under way>"

    def take(self, size: int, stream: Any) -> Any:
        """A piece of `size` bytes for what is queued on `stream` next. REQUIRES: `lock` is held; `piece_bytes` at most."""
        assert self.lock.locked()
        assert 0 < size <= self.piece_bytes
        start = self._at if self._at + size <= self.size else 0
        end, kept = start + _aligned(size), deque[tuple[int, int, Any, Any]]()
        self._at = end
        for first, last, user, event in self._under_way:
            if first < end and start < last and user is not stream:
                stream.wait_event(event)
            left = ((first, min(last, start)), (max(first, end), last))  # of what was used then, what is not used now
            kept.extend((low, high, user, event) for low, high in left if low < high)
        self._under_way = kept
        return self.memory[start : start + size]

    def give_back(self, piece: Any, stream: Any, event: Any) -> None:
        """Give a piece back: the copies that use it are queued on `stream` before `event`. REQUIRES: `lock` is held."""
        assert self.lock.locked()
        if event is not None:
            start = int(piece.storage_offset())
            self._under_way.append((start, start + _aligned(int(piece.numel())), stream, event))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
