"""Resets of vLLM's own prefix cache, of which it does not notify connectors: watched at the block pool.

vLLM asks its block pool, which fails while a block is held. vLLM's code is unchanged; the hook wraps the method of the one pool
object that the connector is given. The scheduler's thread.
"""

from collections.abc import Callable

METHOD = "reset_prefix_cache"


class OwnPrefixes:
    """Whether vLLM's own blocks can have KV of earlier weights: from new weights on until vLLM has reset its prefix cache.

    A step is the last one before something happened.
    """

    def __init__(self) -> None:
        self.are_old = False
        self._are_none = False
        self._reset_step = 0  # before the first step there is nothing in it

    def __repr__(self) -> str:
        return f"<OwnPrefixes {'of earlier weights, too' if self.are_old else 'of these weights'}>"

    def note_reset(self, step: int) -> None:
        """vLLM has reset its prefix cache."""
        self.are_old, self._are_none, self._reset_step = False, True, step

    def note_used(self) -> None:
        """A request was given blocks."""
        self._are_none = False

    def renew(self, step: int | None = None) -> None:
        """The weights have changed: now, or in the past after a step."""
        self.are_old = not self._are_none and (step is None or self._reset_step < step)


def watch_resets(pool: object, before: Callable[[], None], after: Callable[[bool], None]) -> bool:
    """Have `before` called when the pool is about to reset its prefix cache, and `after` with whether it has; neither may
    raise.

    False where the pool has no such method.
    """
    reset = getattr(pool, METHOD, None)
    if not callable(reset):
        return False

    def watched(*arguments: object, **named: object) -> object:
        before()
        answer = reset(*arguments, **named)
        after(bool(answer))
        return answer

    setattr(pool, METHOD, watched)
    return True
