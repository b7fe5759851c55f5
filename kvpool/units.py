"""Units: sizes and durations with their units, as configuration files, options and output have them.

    size      := number [B | KiB | MiB | GiB | TiB | KB | MB | GB | TB]
    duration  := number [ns | us | ms | s | m | h | d]

Pure functions; any thread.
"""

import re

from kvpool.errors import InvalidArgument

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_DURATION_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_MAX = (1 << 63) - 1
DURATION_MAX_S = 100_000 * 86400.0  # in nanoseconds it fits 64 bits
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of a size such as `64MiB`. Raises InvalidArgument."""
    match = _WRITTEN.fullmatch(text)
    unit = _SIZE_UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise InvalidArgument(f"{text!r} is no size, expected a number with B, KiB, MiB, GiB or TiB")
    size = float(match.group(1)) * unit if "." in match.group(1) else int(match.group(1)) * unit
    if size > SIZE_MAX:
        raise InvalidArgument(f"{text!r} is too large a size, expected less than {SIZE_MAX + 1 >> 40}TiB")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `500ms`. A bare number has no meaning and is refused. Raises InvalidArgument."""
    match = _WRITTEN.fullmatch(text)
    unit_s = _DURATION_UNITS_S.get(match.group(2)) if match else None
    if match is None or unit_s is None:
        raise InvalidArgument(f"{text!r} is no duration, expected a number with ms, s, m, h or d")
    seconds = float(match.group(1)) * unit_s
    if seconds > DURATION_MAX_S:
        raise InvalidArgument(f"{text!r} is too long a duration, expected at most {DURATION_MAX_S / 86400:.0f}d")
    return seconds


def format_size(size: int) -> str:
    """`64.0 MiB`: three significant digits in the largest binary unit that fits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def write_size(size: int) -> str:
    """`64MiB`: a size exactly, as a configuration file has it, in the largest binary unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit.upper()] == 0:
            return f"{size // _SIZE_UNITS[unit.upper()]}{unit}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """`1.5 ms`: a duration in the unit a person would choose."""
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
