"""Device: the tier's memory on a GPU, and the mover that copies chunks there. The border to the CUDA driver.

Opening loads the driver's library, makes a context on the device, and takes the memory. All of that may take seconds, and for
ever on a broken device: it runs on a thread of its own, and so does closing. An `OpenDevice` exists only while it is usable.
"""

import os

import kvpool_native
from kvpool.config.hbm_options import ORDINAL_MAX, HbmConfig
from kvpool.errors import KVPoolError
from kvpool.tiers.base import ArenaMemory
from kvpool.tiers.copies import MemoryExport
from kvpool.tiers.hbm.plan import RING_BYTES, HbmPlan

# What the driver answers for the number after that of the last device.
_NO_SUCH_DEVICE = "CUDA_ERROR_INVALID_DEVICE"


class DeviceUnavailable(KVPoolError):
    """The device, or its memory, cannot be had."""


class OpenDevice:
    """An opened device. Control thread only, but for `close`."""

    def __init__(self, plan: HbmPlan, memory: ArenaMemory) -> None:
        """Blocks. Raises DeviceUnavailable."""
        try:
            self._device = _find_device(plan.config)
            self._memory = self._device.allocate(plan.size)
            index = kvpool_native.IndexView(memory.index)
            self.mover = kvpool_native.DeviceMover(self._device, self._memory, memory.arena, index, RING_BYTES)
            self._fd = self._memory.export()
        except (OSError, RuntimeError, MemoryError) as error:
            raise DeviceUnavailable(str(error)) from error

    def __repr__(self) -> str:
        return f"<OpenDevice {self.name}, {self._memory.size} bytes>"

    @property
    def name(self) -> str:
        """What the driver calls the device."""
        return self._device.name

    @property
    def uuid(self) -> bytes:
        """The device's UUID."""
        return self._device.uuid

    @property
    def export(self) -> MemoryExport:
        """The memory for clients."""
        return MemoryExport(self._device.uuid, self._memory.size, self._fd)

    @property
    def is_hung(self) -> bool:
        """Whether the device has left what it was given unanswered."""
        return bool(self.mover.stats()["is_hung"])

    def stats(self) -> dict[str, int | float | str]:
        """What the mover counts, by public names."""
        return {f"hbm.mover_{name}": count for name, count in self.mover.stats().items()}

    def info(self) -> dict[str, int | float | str]:
        """What operators may want to know."""
        return {
            "hbm_device": self._device.name,
            "hbm_uuid": format_uuid(self._device.uuid),
            "hbm_driver_version": self._device.driver_version,
            "hbm_copy_method": self._device.copy_method,
        }

    def close(self, timeout_s: float) -> bool:
        """End the mover; each chunk under way is reported. False: the device hangs, and its thread is abandoned. Blocks."""
        os.close(self._fd)
        return self.mover.stop(timeout_s)


def format_uuid(uuid: bytes) -> str:
    """A UUID as nvidia-smi -L prints it."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _find_device(config: HbmConfig) -> "kvpool_native.Device":
    """The configured device. Raises OSError or RuntimeError."""
    if config.ordinal is not None:
        return kvpool_native.Device(config.driver, config.ordinal)
    for ordinal in range(ORDINAL_MAX + 1):
        try:
            device = kvpool_native.Device(config.driver, ordinal)
        except RuntimeError as error:
            if _NO_SUCH_DEVICE not in str(error):
                raise
            break
        if device.uuid == config.uuid:
            return device
    raise DeviceUnavailable(f"hbm.device is {config.device}, and the driver has no such device")
