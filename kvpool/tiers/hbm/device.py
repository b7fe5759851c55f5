"""Device: the tier's memory on a GPU, and the mover that copies chunks there. The boundary to the CUDA driver.

Opening loads the driver's library, makes a context on the device, and takes the memory. All of that may take seconds, and for
ever on a broken device: it runs on a thread of its own, and closing on an executor's. An `OpenDevice` exists only while it is
usable."""

import os

import kvpool_native
from kvpool.config.hbm_options import ORDINAL_MAX, HbmConfig
from kvpool.errors import KVPoolError
from kvpool.tiers.base import ArenaMemory, Info, MemoryExport
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
            self._mover = kvpool_native.DeviceMover(self._device, self._memory, memory.arena, index, RING_BYTES)
            self._fd = self._memory.export()
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            raise DeviceUnavailable(str(error)) from error

    def __repr__(self) -> str:
        return f"<OpenDevice {self.name}, {self._memory.size} bytes>"

    @property
    def name(self) -> str:
        """What the driver calls the device."""
        return self._device.name

    @property
    def export(self) -> MemoryExport:
        """The memory for clients."""
        return MemoryExport(self._device.uuid, self._memory.size, self._fd)

    @property
    def is_hung(self) -> bool:
        """Whether the device has left what it was given unanswered."""
        return bool(self._mover.stats()["is_unresponsive"])

    def fileno(self) -> int:
        """The mover's eventfd, which can be read while there is something completed."""
        return self._mover.fileno()

    def copy(self, rows: bytes) -> int:
        """Start to copy the chunks of these rows (`DEVICE_MOVE_ROW`): the job's number, 0 where too much is under way."""
        return self._mover.promote(rows)

    def check(self, rows: bytes) -> int:
        """Start to compare copies with their checksums, alike."""
        return self._mover.check(rows)

    def completed(self) -> list[tuple[int, int, int]]:
        """What has ended since the last call: job, chunk, and `Outcome`, each chunk once."""
        return [(end.job, end.chunk, end.outcome) for end in self._mover.take_outcomes()]

    def stats(self) -> dict[str, int | float]:
        """What the mover counts."""
        return self._mover.stats()

    def info(self) -> Info:
        """What operators may want to know."""
        return {
            "hbm_device": self._device.name,
            "hbm_uuid": _format_uuid(self._device.uuid),
            "hbm_driver_version": self._device.driver_version,
            "hbm_copy_method": self._device.copy_method,
        }

    def close(self, timeout_s: float) -> bool:
        """End everything; each chunk under way is reported. False: it hangs, and a thread is abandoned. Blocks."""
        os.close(self._fd)
        return self._mover.stop(timeout_s)


def _format_uuid(uuid: bytes) -> str:
    """A UUID as nvidia-smi -L prints it."""
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _find_device(config: HbmConfig) -> "kvpool_native.Device":
    """The configured device. Raises OSError or RuntimeError."""
    if config.ordinal is not None:
        return kvpool_native.Device(config.driver, config.ordinal)
    seen: list[str] = []
    for ordinal in range(ORDINAL_MAX + 1):
        try:
            device = kvpool_native.Device(config.driver, ordinal)
        except RuntimeError as error:
            if _NO_SUCH_DEVICE in str(error):
                break
            seen.append(f"cuda:{ordinal} cannot be opened ({error})")  # it may be another one
            continue
        if device.uuid == config.uuid:
            return device
        seen.append(_format_uuid(device.uuid))
    found = ", ".join(seen) or "no device"
    raise DeviceUnavailable(f"the driver has no such device, but {found}: see nvidia-smi -L and CUDA_VISIBLE_DEVICES")
