"""Save room: how many saves of one rank are under way at once, and of how many bytes.

A save that finds no room waits, and is asked about again in every iteration: the engine keeps its blocks meanwhile, which are
the bound on what waits. The executor's thread of one rank.
"""

# As many as a daemon's connection may have by default; each has a thread.
SAVES_MAX = 64
# What native threads and the daemon have before them (a guess). A larger save is alone.
SAVE_BYTES_MAX = 1 << 30


class SaveRoom:
    """See the module. Invariant: `_bytes` has the requests with saves under way, and `_deferred` none of these."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}  # by request
        self._deferred: set[int] = set()
        self.deferred_saves = 0

    def __repr__(self) -> str:
        return (
            f"<SaveRoom {len(self._bytes)} saves of {sum(self._bytes.values())} bytes, {len(self._deferred)} deferred>"
        )

    def take_bytes(self, request_id: int, size: int) -> bool:
        """Room for a request's save of so many bytes; False where there is none."""
        is_free = len(self._bytes) < SAVES_MAX and sum(self._bytes.values()) + size <= SAVE_BYTES_MAX
        if not is_free and self._bytes:
            return False
        self._bytes[request_id] = self._bytes.get(request_id, 0) + size
        self._deferred.discard(request_id)
        return True

    @property
    def has_deferred(self) -> bool:
        """Whether saves wait for room: what comes later waits behind them."""
        return bool(self._deferred)

    def defer_save(self, request_id: int) -> None:
        """Count a save that waits for room, once."""
        if request_id not in self._deferred:
            self._deferred.add(request_id)
            self.deferred_saves += 1

    def give_back_bytes(self, request_id: int) -> None:
        """A request's save has ended, or will never begin."""
        self._bytes.pop(request_id, None)
        self._deferred.discard(request_id)
