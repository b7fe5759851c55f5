"""Streams of engines: on which one the calling thread's engine queues work on an array, as a raw handle of the driver.

torch's current stream, read through the torch that the engine has loaded; the stream that an array with a
`__cuda_array_interface__` names now; else the legacy default stream, which waits for all others that do not opt out. Any
thread.
"""

import sys

LEGACY_STREAM = 1  # CU_STREAM_LEGACY


def engine_stream(array: object, ordinal: int) -> int:
    """The handle, for an array on the device with this number."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(torch.cuda.current_stream(ordinal).cuda_stream)
    interface = getattr(array, "__cuda_array_interface__", None)
    stream = interface.get("stream") if isinstance(interface, dict) else None
    return LEGACY_STREAM if stream is None else int(stream)
