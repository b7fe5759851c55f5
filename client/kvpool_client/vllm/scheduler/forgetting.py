"""Resets of vLLM's own prefixes, which it makes without a word to its connectors: watched at the block pool.

vLLM asks its block pool, which fails while somebody holds a block. Its own code is left as it is; the one pool that the
connector is given has a call put before its method and one behind it. The scheduler's thread.
"""

from collections.abc import Callable

METHOD = "reset_prefix_cache"


class OwnPrefixes:
    """Whether vLLM's own blocks can have KV of earlier weights: from new weights on until vLLM has forgotten its prefixes."""

    def __init__(self) -> None:
        self.are_old = False
        self._are_none = False

    def __repr__(self) -> str:
        return f"<OwnPrefixes {'of earlier weights, too' if self.are_old else 'of these weights'}>"

    def note_reset(self) -> None:
        """vLLM has forgotten them all."""
        self.are_old, self._are_none = False, True

    def note_used(self) -> None:
        """A request was given blocks."""
        self._are_none = False

    def renew(self) -> None:
        """The weights are others from now on."""
        self.are_old = not self._are_none


def watch_resets(pool: object, before: Callable[[], None], after: Callable[[bool], None]) -> bool:
    """Have `before` called when the pool is to forget its prefixes, and `after` with whether it has; neither may raise.

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
