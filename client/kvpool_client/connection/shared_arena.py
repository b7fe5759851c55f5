"""Shared arena: the daemon's arena in this process, mapped once for all sessions that have it.

A daemon that has taken over the memory of the one before passes the same file: then the mapping stays, with everything that
hangs on it, such as its registration with a device's driver, and the views that engines took. Immutable; any thread.
"""

import os
from dataclasses import dataclass

import kvpool_native


@dataclass(frozen=True, eq=False)
class SharedArena:
    """`mapping` of the file that has these numbers."""

    mapping: kvpool_native.Mapping
    file: tuple[int, int]

    @classmethod
    def of(cls, fd: int, size: int, *, is_writable: bool, former: "SharedArena | None") -> "SharedArena":
        """`former` where it is of the same file, of as many bytes, and may be written alike; else a new one. The caller closes
        the descriptor. Raises as `Mapping.attach`."""
        found = os.fstat(fd)
        file = (found.st_dev, found.st_ino)
        if former is not None and former.file == file:  # the kernel gives them in turn
            mapping = former.mapping
            if (mapping.size, mapping.writable) == (size, is_writable):
                return former
        return cls(kvpool_native.Mapping.attach(fd, size, writable=is_writable), file)
