"""Memory that one process of an engine makes and others of the same user map.

Made with memfd_create and opened through /proc: it has no name to guess, and is gone with its processes. Any thread; what is
in it, and in which order, its users agree.
"""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

import kvpool_native


class SharedBytes:
    """One mapping. `path` opens it in another process of the same user; `view` is its bytes."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        """Takes `fd`. Raises OSError."""
        self._fd = fd
        self.path = path
        self.view: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)

    @classmethod
    def create(cls, name: str, size: int) -> "SharedBytes":
        """New memory, zeroed; pages are taken when they are touched."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # who maps it can rely on its size
        return cls(fd, size, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def attach(cls, path: str, size: int) -> "SharedBytes":
        """Memory that another process made. Raises OSError, also when it is smaller than `size`."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise OSError(f"{path} is smaller than {size} bytes")
        return cls(fd, size, path)

    def mapping(self) -> kvpool_native.Mapping:
        """Another mapping of the same memory, for native copies. Raises OSError."""
        return kvpool_native.Mapping.attach(self._fd, self.view.nbytes, writable=True)

    def close(self) -> None:
        """Close the descriptor; the mapping lives as long as somebody has a view of it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
