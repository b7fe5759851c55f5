"""Pinned host memory that a device copies from and to: a tensor, registered with the driver so that copies need no bounce
buffer.

Registering pins every page, seconds for a large arena; that happens on a thread of its own, and copies that begin earlier are
only slower. Where the driver refuses, copies stay slower. torch is imported when the first one is made. Any thread.
"""

import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_READ_ONLY = 8  # cudaHostRegisterReadOnly: pages that this process may only read


class PinnedBytes:
    """`tensor` is the memory, which lives as long as this does. Invariant: registered memory is unregistered before it is
    unmapped."""

    def __init__(self, memory: npt.NDArray[np.uint8], device: str, *, is_writable: bool = True) -> None:
        """`is_writable`: False where the process has mapped the memory read-only; the tensor is then only copied from."""
        import torch  # optional heavy dependency: an engine with tensors on a device has it loaded

        self.tensor = torch.from_numpy(memory)
        self._flags = _PORTABLE if is_writable else _PORTABLE | _READ_ONLY
        self._lock = threading.Lock()
        self._unregister: Any = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        if device.startswith("cuda"):
            runtime: Any = torch.cuda
            threading.Thread(target=self._register, args=(runtime, device), name="kvpool-pin", daemon=True).start()

    @property
    def is_pinned(self) -> bool:
        """Whether copies are direct now."""
        return self._unregister is not None

    def close(self) -> None:
        """Unregister. Requires: no copy is under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister()

    def _register(self, runtime: Any, device: str) -> None:
        address, size = self.tensor.data_ptr(), self.tensor.numel()
        with self._lock:
            if self._is_closed:
                return
            try:
                with runtime.device(device):
                    is_done = int(runtime.cudart().cudaHostRegister(address, size, self._flags)) == 0
            except RuntimeError:  # the driver's refusal: copies bounce
                return
            if is_done:
                self._unregister = weakref.finalize(self, _unregister, runtime, address)
                self._unregister.atexit = False  # the driver may be gone by then


def _unregister(runtime: Any, address: int) -> None:
    runtime.cudart().cudaHostUnregister(address)
