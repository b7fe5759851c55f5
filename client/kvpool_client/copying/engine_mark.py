"""A mark behind what an engine has queued on a device: whoever copies on another thread waits for it before it reads.

torch is imported where tensors are on a device, never else. Any thread makes it, another may wait.
"""

from collections.abc import Callable
from typing import Any


def engine_mark(device: str) -> Callable[[], None]:
    """A call that returns when the device has done everything that the calling thread's engine has queued so far."""
    if device == "cpu":
        return _nothing_queued
    import torch  # optional heavy dependency: an engine with tensors on a device has it loaded

    library: Any = torch  # its stream and event calls are untyped
    event = library.cuda.Event(blocking=True)
    event.record(library.cuda.current_stream(library.device(device)))
    wait: Callable[[], None] = event.synchronize
    return wait


def _nothing_queued() -> None:
    """The CPU has done everything when it returns."""
