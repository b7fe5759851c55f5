"""Turns of one sequence: one call at a time, and none after a call that ended in the middle.

A call that is interrupted (Ctrl-C, a signal handler that raises, no memory) may leave pages, counts and the staging
area of a device at odds with one another. What comes after it raises, so that nothing is computed from them.

Any thread; a call inside another one, from whatever thread, raises.
"""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvpool.errors import KVPoolError

P = ParamSpec("P")
Answer = TypeVar("Answer")


class Turns:
    """See the module. Errors of the pool (KVPoolError) are raised where everything is in order, and end no sequence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._is_under_way = False  # stays so where a call ended in the middle

    def __enter__(self) -> None:
        """Raises KVPoolError."""
        if not self._lock.acquire(blocking=False):
            raise KVPoolError("the sequence is in use by another call, expected one at a time")
        self._owner = threading.get_ident()
        if self._is_under_way:
            self._lock.release()
            raise KVPoolError("an earlier call ended in the middle, expected the sequence to be closed")
        self._is_under_way = True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, KVPoolError):
            self._is_under_way = False
        self._lock.release()

    def check_end(self) -> None:
        """Check that no other thread is in a call. Raises KVPoolError."""
        if self._lock.locked() and self._owner != threading.get_ident():
            raise KVPoolError("the sequence is in use by another thread, expected to be closed behind its call")


class HasTurns(Protocol):
    """What `in_turn` is for."""

    turns: Turns


Owner = TypeVar("Owner", bound=HasTurns)


def in_turn(method: Callable[Concatenate[Owner, P], Answer]) -> Callable[Concatenate[Owner, P], Answer]:
    """A method that takes a turn of its sequence."""

    @functools.wraps(method)
    def taken(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        with owner.turns:
            return method(owner, *args, **kwargs)

    return taken
