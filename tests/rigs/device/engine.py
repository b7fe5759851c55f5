"""Engines of tests whose KV is on an emulated device: paged arrays with a `__cuda_array_interface__`, and a stream of their
own.

The host reads and writes the arrays through copies of the driver alone, as with a real device.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool_client as kv
from tests.rigs.device import emulated
from tests.rigs.device.emulated import EmulatedArray

Array = npt.NDArray[Any]


class EngineArray(EmulatedArray):
    """A layer's array. `stream`: the raw handle that its interface names; None: it names none."""

    def __init__(self, array: Array, *, ordinal: int = 0, stream: int | None = None) -> None:
        super().__init__(array, ordinal=ordinal)
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**super().__cuda_array_interface__, "stream": self.stream}


class EngineStream:
    """A stream that an engine has made: what it queues is done later. Begun by `engine_stream`."""

    def __init__(self, library: ctypes.CDLL, context: ctypes.c_void_p) -> None:
        self._library, self._context = library, context
        self._sources: list[Array] = []  # must stay until they are copied
        made = ctypes.c_void_p()
        self._in_context("cuStreamCreate", ctypes.byref(made), 1)
        assert made.value is not None
        self.handle = made.value

    def write(self, array: EmulatedArray, values: Array) -> None:
        """Queue a copy of the whole array."""
        source = np.ascontiguousarray(values)
        self._sources.append(source)
        words = (ctypes.c_uint64(array.address), ctypes.c_uint64(source.ctypes.data), ctypes.c_size_t(source.nbytes))
        self._in_context("cuMemcpyAsync", *words, ctypes.c_void_p(self.handle))

    def wait(self) -> None:
        """Wait for what is queued."""
        self._in_context("cuStreamSynchronize", ctypes.c_void_p(self.handle))

    def close(self) -> None:
        """Wait, and end the stream."""
        self.wait()
        self._in_context("cuStreamDestroy_v2", ctypes.c_void_p(self.handle))

    def _in_context(self, name: str, *arguments: object) -> None:
        popped = ctypes.c_void_p()
        assert self._library.cuCtxPushCurrent_v2(self._context) == 0
        code = getattr(self._library, name)(*arguments)
        assert self._library.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
        assert code == 0, f"{name} failed: {code}"


@contextmanager
def engine_stream(ordinal: int = 0) -> Iterator[EngineStream]:
    """A stream of an engine on this device."""
    library, context = ctypes.CDLL(emulated.driver_path()), ctypes.c_void_p()
    assert library.cuInit(0) == 0
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
    stream = EngineStream(library, context)
    try:
        yield stream
    finally:
        emulated.order("clear 1\ndelay_us 200")
        stream.close()
        assert library.cuDevicePrimaryCtxRelease_v2(ordinal) == 0


BLOCK_TOKENS = 16


class DeviceKv:
    """Paged KV of one engine, zeroed. `arrays` are what it registers."""

    def __init__(
        self,
        layout: kv.Layout,
        form: str,
        blocks: int,
        *,
        ordinal: int = 0,
        stream: EngineStream | None = None,
    ) -> None:
        """`form`: as `register` has it, or mla: one plane."""
        self.form, self.layout = form, layout
        token = layout.kv_heads * layout.head_dim
        self.shape: tuple[int, ...] = {
            "kv_first": (2, blocks, BLOCK_TOKENS, token),
            "block_first": (blocks, 2, BLOCK_TOKENS, token),
            "packed": (blocks, layout.planes * BLOCK_TOKENS * token),
            "mla": (blocks, BLOCK_TOKENS, token),
        }[form]
        handle = stream.handle if stream is not None else None
        zeros = np.zeros(self.shape, np.uint16)
        self.arrays = [EngineArray(zeros, ordinal=ordinal, stream=handle) for _ in range(layout.layers)]

    @property
    def register_form(self) -> str:
        """What `register` is to be given."""
        return self.form if self.form in ("kv_first", "block_first") else "auto"

    def random_layers(self, seed: int) -> list[Array]:
        """Random values for all arrays."""
        dice = np.random.default_rng(seed)
        return [dice.integers(0, 1 << 16, self.shape, dtype=np.uint16) for _ in self.arrays]

    def write(self, layers: Sequence[Array]) -> None:
        """Write all arrays, and wait for it."""
        for array, values in zip(self.arrays, layers, strict=True):
            array.write(values)

    def read(self) -> list[Array]:
        """All arrays as they are on the device now."""
        return [array.read() for array in self.arrays]

    def chunk(self, layers: Sequence[Array], block_ids: Sequence[int]) -> bytes:
        """The bytes that a chunk of these blocks is stored as."""
        parts = []
        for array in layers:
            if self.form in ("packed", "mla"):
                parts += [array[block].tobytes() for block in block_ids]
            else:
                planes = array if self.form == "kv_first" else array.swapaxes(0, 1)
                parts += [planes[plane, block].tobytes() for plane in range(2) for block in block_ids]
        return b"".join(parts)

    def chunks(self, block_ids: Sequence[int], chunks: int) -> list[bytes]:
        """The bytes of so many chunks on the device, whose blocks these are one behind the other."""
        layers, step = self.read(), len(block_ids) // chunks
        return [self.chunk(layers, block_ids[at * step : (at + 1) * step]) for at in range(chunks)]


def use_emulated_driver(monkeypatch: pytest.MonkeyPatch, method: str = "batch") -> None:
    """Have clients of this process use it, with one of its methods of copies."""
    for name, value in emulated.environment(method).items():
        monkeypatch.setenv(name, value)
