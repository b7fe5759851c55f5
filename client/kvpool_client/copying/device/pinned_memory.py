"""Host memory registered with a device's driver, so that copies from and to it need no bounce buffer.

Registering pins every page, seconds for a large arena; that happens on a thread of its own, and copies that begin earlier are
only slower. Where the driver refuses, copies stay slower. Any thread. Lock: `_lock` guards what is registered, and is not held
while the driver works.
"""

import threading

import kvpool_native


class PinnedBytes:
    """One shared mapping, from the first copy on. Invariant: after `close` nothing is registered, or is unregistered at once
    when the driver has done it."""

    def __init__(self, memory: kvpool_native.Mapping, device: kvpool_native.Device | None) -> None:
        """`device`: None where the engine is on the CPU, and nothing is registered."""
        self.memory = memory
        self.bytes = memory.view()
        self.address = int(self.bytes.ctypes.data)
        self._device = device
        self._lock = threading.Lock()
        self._pinned: kvpool_native.PinnedMapping | None = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock
        if device is not None:
            threading.Thread(target=self._pin, args=(device,), name="kvpool-pin", daemon=True).start()

    def __repr__(self) -> str:
        return f"<PinnedBytes {self.memory.size} bytes, {'pinned' if self.is_pinned else 'not pinned'}>"

    @property
    def is_pinned(self) -> bool:
        """Whether copies are direct now."""
        pinned = self._pinned
        return pinned is not None and pinned.is_pinned

    def close(self) -> None:
        """Unregister. Requires: no copy is under way. Idempotent; does not wait for a driver that is just registering."""
        with self._lock:
            self._is_closed = True
            pinned, self._pinned = self._pinned, None
        del pinned

    def _pin(self, device: kvpool_native.Device) -> None:
        pinned = device.pin(self.memory, self.memory.writable)
        with self._lock:
            if not self._is_closed:
                self._pinned = pinned
