"""Life page: how clients of former lives learn that the arena's slots are a later one's.

A page of shared memory, the same through all lives, as the arena is. A life puts its number there before it gives any slot
away. Clients map it for reading and look at it after each read of the arena: what they have read under the index of a life
counts only while that life's number stands. Seals that forbid writing would bind later lives too, so clients get a descriptor
that is opened for reading. What it is not: a sign that a daemon lives, or proof of anything: who may open the daemon's files,
its user or root, can write it. That ends loads, and costs the next life what it would have taken over.

Invariant: each life puts its own number, and none has been given before. Control thread only.
"""

import fcntl
import os

import kvpool_native
from kvpool.ids import PAGE_BYTES


class LifePage:
    """See the module. `fd`: writable, for who keeps it; `client_fd`: for reading alone, for clients. Both are its own."""

    def __init__(self, mapping: kvpool_native.Mapping) -> None:
        """`mapping`: the page, writable. Raises OSError."""
        self.mapping = mapping
        self.fd = mapping.fd
        self.client_fd = os.open(f"/proc/self/fd/{mapping.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._page = kvpool_native.LifePage(mapping)

    @classmethod
    def create(cls) -> "LifePage":
        """That of an arena that had no life before. Raises OSError."""
        mapping = kvpool_native.Mapping.create("kvpool-life", PAGE_BYTES)
        fcntl.fcntl(mapping.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        return cls(mapping)

    @classmethod
    def attach(cls, fd: int) -> "LifePage":
        """That of the former life; the caller keeps its own descriptor. Raises OSError."""
        return cls(kvpool_native.Mapping.attach(fd, PAGE_BYTES, writable=True))

    def __repr__(self) -> str:
        return f"<LifePage of life {self.number}>"

    @property
    def number(self) -> int:
        """The life whose slots they are; 0: none has begun."""
        return self._page.life

    def begin_life(self, number: int) -> None:
        """The slots are this life's from now on, whatever stands there. REQUIRES: no life has had the number."""
        self._page.begin(number)

    def close(self) -> None:
        """Close the clients' descriptor. The mapping ends with its last user. Idempotent."""
        if self.client_fd >= 0:
            os.close(self.client_fd)
            self.client_fd = -1
