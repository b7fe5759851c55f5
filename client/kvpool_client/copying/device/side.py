"""One registered cache on its device: the streams on which its blocks are copied, and marks behind its engine's work.

A stream for loads and one for saves, made once: a save waits for layers that the engine computes, and a load that stood behind
it could be what these layers wait for. Immutable; any thread. Lock: `load_lock` and `save_lock` keep what one thread queues on
a stream together with its event; none is held while anything is waited for.
"""

import threading
from collections.abc import Callable

import kvpool_native
from kvpool_client.copying.device.engine_stream import engine_stream

# One look at a mark of an engine that computes for longer.
MARK_SLICE_S = 1.0


class DeviceSide:
    """See the module. `view` has the blocks' addresses, and keeps their memory alive."""

    def __init__(self, device: kvpool_native.Device, view: kvpool_native.CacheView, array: object) -> None:
        """`array`: one of the engine's, by which its stream is found. Raises RuntimeError where the device refuses."""
        self.device = device
        self.view = view
        self._array = array
        self.load_stream, self.save_stream = device.stream(), device.stream()
        self.load_lock, self.save_lock = threading.Lock(), threading.Lock()

    def __repr__(self) -> str:
        return f"<DeviceSide of {self.device.name}, {self.device.copy_method} copies>"

    def after_engine(self) -> kvpool_native.DeviceEvent:
        """A mark behind everything that the calling thread's engine has queued on the device so far."""
        return self.device.mark(engine_stream(self._array, self.device.ordinal))

    def engine_mark(self) -> Callable[[], None]:
        """A call that returns when the device has done everything that the calling thread's engine has queued so far."""
        mark = self.after_engine()

        def wait() -> None:
            while not mark.wait(MARK_SLICE_S):
                pass

        return wait
