"""Part `copies`: copies of pieces between the arena's kind of memory and a device, against one copy of the same bytes.

The floor is one copy of as many bytes between the same two memories, in the same run. 32 KiB is what a block of 16 tokens takes
in one plane of a layer with 8 KV heads of 128 in 16 bits. The method `kernel` asks the driver here for each address whether it
is reached, which loads and saves do once a chunk. Inside the device a piece costs more than its bytes: no bar.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool_client.copying.device.pinned_memory import PinnedBytes
from tests.gpu import setting
from tests.rigs.daemon import wait_until
from tests.rigs.device import emulated
from tests.rigs.device.emulated import EmulatedArray

TOTAL = (4 << 20) if setting.IS_REHEARSAL else (512 << 20)
PIECES = (4 << 10, 32 << 10) if setting.IS_REHEARSAL else (8 << 10, 32 << 10, 128 << 10, 1 << 20, 16 << 20)
# Of one large copy of the same bytes.
BLOCK_BYTES, BLOCK_BAR, LARGE_BYTES, LARGE_BAR = 32 << 10, 0.6, 1 << 20, 0.9
WAIT_S = 60.0
SEED = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that copies go from or to."""

    name: str
    address: int


def main() -> None:
    """Measure, for each of the driver's methods."""
    memory = kvpool_native.Mapping.create("copied", TOTAL)
    for method in emulated.METHODS:
        setting.use_driver(method)
        device = kvpool_native.Device(emulated.driver_path(), 0)
        assert device.copy_method == method, f"{device.copy_method}, expected {method}"
        pinned = PinnedBytes(memory, device)
        wait_until(lambda pinned=pinned: pinned.is_pinned, "the memory is pinned", WAIT_S)  # type: ignore[misc]
        blocks, others = (EmulatedArray(np.zeros(TOTAL, np.uint8)) for _ in range(2))
        host, on_device = Place("host", pinned.address), Place("device", blocks.address)
        for source, target in ((host, on_device), (on_device, host), (on_device, Place("device", others.address))):
            _measure(device, method, source, target)
        pinned.close()
        blocks.free()
        others.free()


def _measure(device: kvpool_native.Device, method: str, source: Place, target: Place) -> None:
    stream = device.stream()

    def copied(pieces: npt.NDArray[np.uint64], size: int) -> Callable[[], None]:
        """Every piece to a place of its own: the order of the sources is another one."""
        shuffled = list(pieces.tolist())
        random.Random(SEED).shuffle(shuffled)
        targets = (np.uint64(target.address) + pieces).tobytes()
        sources = (np.uint64(source.address) + np.array(shuffled, np.uint64)).tobytes()
        sizes = np.full(len(pieces), size, np.uint64).tobytes()

        def copy() -> None:
            stream.copy(targets, sources, sizes)
            assert stream.record().wait(WAIT_S), "the device does not answer"

        return copy

    whole = copied(np.zeros(1, np.uint64), TOTAL)
    for size in PIECES:
        pieces = np.arange(0, TOTAL, size, dtype=np.uint64)
        floor, taken = setting.seconds_of(whole), setting.seconds_of(copied(pieces, size))
        bar = BLOCK_BAR if size == BLOCK_BYTES else LARGE_BAR if size >= LARGE_BYTES else None
        crosses_bus = "host" in (source.name, target.name)
        setting.figure(
            f"{method}: {source.name} to {target.name}, pieces of {size >> 10} KiB",
            setting.rates(taken, TOTAL),
            "GB/s",
            ratio=min(floor) / min(taken),
            bar=bar if method == "batch" and crosses_bus else None,
        )


if __name__ == "__main__":
    main()
