"""Interface of a keeper: who has the memory of one life after the other, by the names of its files.

A keeper has descriptors and reads none of the bytes behind them. It has at most FILES_MAX: the arena and the life page, which
are the same ones in every life, and three further files of the life that is being taken over and of the one that takes over.

    kvpool-arena   kvpool-life   kvpool-index-LIFE   kvpool-records-LIFE   kvpool-book-LIFE

What is given is there for the next life from the moment that the call returns, whatever happens to the one that gave it.
"""

from collections.abc import Collection
from typing import Protocol

FILES_MAX = 8
ARENA, LIFE_PAGE = "kvpool-arena", "kvpool-life"
INDEX, RECORDS, BOOK = "kvpool-index", "kvpool-records", "kvpool-book"


def name_of(kind: str, life: int) -> str:
    """The name of a file of one life."""
    return f"{kind}-{life}"


class KeeperFault(Exception):
    """A keeper has not done what it was asked: why, as a clause. What it has is unknown."""


class Keeper(Protocol):
    """A keeper of memory. Control thread only; no call waits for long."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    def why_it_may_end(self, *, is_restart: bool) -> str:
        """Why what it has may not outlive a stop of the daemon, as a clause; empty where it does for certain. `is_restart`: a
        service manager has announced it as one."""

    def take_memory(self) -> dict[str, int]:
        """What it has, as descriptors by name, which are the caller's to close. It goes on having it. Raises KeeperFault."""

    def give_memory(self, name: str, descriptor: int) -> None:
        """Have it keep a file. REQUIRES: it has none of this name. Raises KeeperFault."""

    def drop_memory(self, names: Collection[str]) -> None:
        """Have it forget files; unknown ones are none. Raises KeeperFault."""
