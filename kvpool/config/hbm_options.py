"""Section `hbm` of the configuration: its options, their record, and the checks between them. See `config`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.config.options import Option, size_option
from kvpool.errors import InvalidArgument
from kvpool.units import write_size

OFF = "off"
DRIVER_BYTES_MAX = 4096
ORDINAL_MAX = 255
_ORDINAL = re.compile(r"cuda:(0|[1-9]\d{0,2})")
# As nvidia-smi -L prints it: of a whole device, or of an instance of one.
_UUID = re.compile(r"(?:GPU|MIG)-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HbmConfig:
    """Section `hbm`; sizes in bytes. `device` "off": there is no device tier."""

    device: str
    capacity: int
    driver: str

    @property
    def is_used(self) -> bool:
        """Whether copies of chunks are kept in device memory."""
        return self.device != OFF

    @property
    def ordinal(self) -> int | None:
        """The number that the driver has for the device; None where it is named by its UUID."""
        found = _ORDINAL.fullmatch(self.device)
        return None if found is None else int(found.group(1))

    @property
    def uuid(self) -> bytes:
        """The device's UUID; empty where it is named by its number."""
        found = _UUID.fullmatch(self.device)
        return b"" if found is None else bytes.fromhex(found.group(1).replace("-", ""))


def check_hbm(parsed: Mapping[str, Any], faults: list[str]) -> None:
    """Add the faults of these options' values together."""
    if parsed["hbm.device"] == OFF:
        return
    capacity, below = parsed["hbm.capacity"], parsed["dram.capacity"]
    if capacity > below:
        faults.append(
            f"hbm.capacity is {write_size(capacity)}, expected at most dram.capacity, {write_size(below)}: "
            "a device has copies of chunks that DRAM has"
        )
    if parsed["server.write_mode"] == "copy":
        faults.append(
            f"hbm.device is {parsed['hbm.device']}, expected {OFF} because server.write_mode is copy: "
            "a client that maps device memory can write it"
        )


def _device(value: Any) -> str:
    found = _ORDINAL.fullmatch(value) if isinstance(value, str) else None
    is_known = value == OFF or (found is not None and int(found.group(1)) <= ORDINAL_MAX)
    if not is_known and not (isinstance(value, str) and _UUID.fullmatch(value)):
        raise InvalidArgument(repr(value))
    return str(value)


def _driver(value: Any) -> str:
    is_text = isinstance(value, str) and 0 < len(os.fsencode(value)) <= DRIVER_BYTES_MAX and value.isprintable()
    if not is_text or ("/" in value and not value.startswith("/")):
        raise InvalidArgument(repr(value))
    return str(value)


HBM_OPTIONS: dict[str, Option] = {
    "hbm.device": Option(
        _device, OFF, f'"{OFF}", "cuda:N" with a number up to {ORDINAL_MAX}, or a UUID such as "GPU-01234567-89ab-…"'
    ),
    "hbm.capacity": size_option("2MiB", "4TiB", "1GiB"),
    "hbm.driver": Option(_driver, "libcuda.so.1", "the name of a shared library, or an absolute path of one"),
}
