"""A word before vLLM forgets its prefixes: it asks its block pool, which fails while somebody holds a block, and no connector.

vLLM's own code is left as it is; the one pool that the connector is given has the question put before its method.
The scheduler's thread.
"""

from collections.abc import Callable

METHOD = "reset_prefix_cache"


def ask_before_reset(pool: object, ask: Callable[[], None]) -> bool:
    """Have `ask` called before the pool forgets its prefixes; it must not raise. False where the pool has no such method."""
    reset = getattr(pool, METHOD, None)
    if not callable(reset):
        return False

    def asked(*arguments: object, **named: object) -> object:
        ask()
        return reset(*arguments, **named)

    setattr(pool, METHOD, asked)
    return True
