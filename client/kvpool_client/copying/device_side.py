"""One registered cache on its device: its blocks as rows of bytes, and the streams on which they are copied.

A stream for loads and one for saves, made once: a save waits for layers that the engine computes, and a load that stood behind
it could be what these layers wait for. torch is imported when the first is made, never before. Immutable; any thread.
"""

from typing import TYPE_CHECKING, Any

from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device_ring import StagingRing

if TYPE_CHECKING:
    import torch

WIDE_BYTES = 8


class DeviceSide:
    """See the module; does not keep the Cache alive.

    `planes[layer][plane]` are rows [blocks, items]; items are of 8 bytes where everything is aligned so.
    """

    def __init__(self, cache: Cache, ring: StagingRing) -> None:
        import torch  # optional heavy dependency: an engine with tensors on a device has it loaded

        self.torch: Any = torch  # its stream and event calls are untyped
        self.ring = ring
        self.device = self.torch.device(cache.device)
        self.planes = [_planes(cache, layer.detach().view(torch.uint8)) for layer in cache.layers]  # type: ignore[attr-defined]  # tensors
        widest = self.torch.int64 if all(_is_wide(plane) for planes in self.planes for plane in planes) else None
        if widest is not None:
            self.planes = [[plane.view(widest) for plane in planes] for planes in self.planes]
        self.item = widest or self.torch.uint8
        self.load_stream, self.save_stream = self._new_stream(), self._new_stream()

    def __repr__(self) -> str:
        return f"<DeviceSide {len(self.planes)} layers on {self.device} as {self.item}>"

    def after_engine(self) -> Any:
        """A mark behind everything that the calling thread's engine has queued on the device so far."""
        if self.load_stream is None:
            return None
        mark = self.torch.cuda.Event()
        mark.record(self.torch.cuda.current_stream(self.device))
        return mark

    def on_stream(self, stream: Any, mark: Any) -> Any:
        """Within the context, work is queued on `stream`, after `mark`."""
        if stream is None:
            return self.torch.no_grad()
        if mark is not None:
            stream.wait_event(mark)
        return self.torch.cuda.stream(stream)

    def event_on(self, stream: Any) -> Any:
        """An event behind what `stream` has; None on the CPU, where everything is done at once."""
        if stream is None:
            return None
        event = self.torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def copy_each(self, targets: "list[torch.Tensor]", *, sources: "list[torch.Tensor]") -> None:
        """Copy each source to its target: one native call, without the interpreter between two."""
        self.torch._foreach_copy_(targets, sources, non_blocking=True)

    def _new_stream(self) -> Any:
        if self.device.type != "cuda":
            return None
        stream = self.torch.cuda.Stream(self.device)
        self.ring.memory.record_stream(stream)
        return stream


def _planes(cache: Cache, whole: "torch.Tensor") -> "list[torch.Tensor]":
    """A layer's planes, each rows [blocks, bytes of a block]; without copying."""
    geometry = cache.geometry
    if geometry.planes == 1:
        planes = [whole]
    else:
        axis = 0 if geometry.form == "kv_first" else 1
        planes = [whole.select(axis, plane) for plane in range(geometry.planes)]
    return [plane.view(plane.shape[0], -1) for plane in planes]


def _is_wide(rows: "torch.Tensor") -> bool:
    sizes = (rows.shape[1], rows.stride(0), rows.storage_offset(), rows.data_ptr())
    return all(int(size) % WIDE_BYTES == 0 for size in sizes)
