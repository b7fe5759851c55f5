"""Parsers of option values, and the message where a value cannot be read. Functions and values."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool.ids import NIXL_PACKAGES
from kvpool.units import format_duration, format_size, parse_duration, parse_size

_DRIVE_WRITES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*DWPD\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: how its value is read, what its default is as a file would write it, and what is expected."""

    parse: Callable[[Any], Any]
    default: str
    expected: str


def size_option(low: str, high: str, default: str) -> Option:
    """A size in bytes, with its unit."""
    least, most = parse_size(low), parse_size(high)

    def parse(value: Any) -> int:
        size = parse_size(value) if isinstance(value, str) else int(_plain_int(value))
        if not least <= size <= most:
            raise InvalidArgument(f"size {size}")
        return size

    return Option(parse, default, f"a size from {low} to {high}, in B, KiB, MiB, GiB or TiB")


def bound_option(low: str, high: str, of_zero: str = "for no bound") -> Option:
    """A size that bounds something; 0, the default, for no bound, or for what `of_zero` says."""
    bound = size_option(low, high, low)

    def parse(value: Any) -> int:
        is_unbounded = (parse_size(value) if isinstance(value, str) else _plain_int(value)) == 0
        return 0 if is_unbounded else int(bound.parse(value))

    return Option(parse, "0B", f"0B {of_zero}, or {bound.expected}")


@dataclass(frozen=True, slots=True)
class DailyWrites:
    """Bytes that may be written in a day: a number of them, or how often the capacity may be overwritten (DWPD)."""

    size: int = 0
    drive_writes: float = 0.0

    def __str__(self) -> str:
        return f"{self.drive_writes:g} DWPD" if self.drive_writes else format_size(self.size)

    def bytes_per_day(self, capacity: int) -> int:
        """Bytes for a capacity; 0: no bound."""
        return int(self.drive_writes * capacity) if self.drive_writes else self.size


def write_budget_option(low: str, high: str, default: str, *, least_writes: float, most_writes: float) -> Option:
    """A size in bytes with its unit, or a number of drive writes per day such as `3 DWPD`."""
    size = size_option(low, high, default)

    def parse(value: Any) -> DailyWrites:
        written = _DRIVE_WRITES.fullmatch(value) if isinstance(value, str) else None
        if written is None:
            return DailyWrites(size=size.parse(value))
        drive_writes = float(written.group(1))
        if not least_writes <= drive_writes <= most_writes:
            raise InvalidArgument(f"{drive_writes} DWPD")
        return DailyWrites(drive_writes=drive_writes)

    return Option(parse, default, f"{size.expected}, or from {least_writes:g} DWPD to {most_writes:g} DWPD")


def duration_option(low: str, high: str, default: str) -> Option:
    """A time in seconds, with its unit."""
    least_s, most_s = parse_duration(low), parse_duration(high)

    def parse(value: Any) -> float:
        if not isinstance(value, str):
            raise InvalidArgument("a duration without unit")
        seconds = parse_duration(value)
        if not least_s <= seconds <= most_s:
            raise InvalidArgument(format_duration(seconds))
        return seconds

    return Option(parse, default, f"a duration with its unit, from {low} to {high}")


def count_option(least: int, most: int, default: int) -> Option:
    """A whole number."""

    def parse(value: Any) -> int:
        count = int(value, 10) if isinstance(value, str) else _plain_int(value)
        if not least <= count <= most:
            raise InvalidArgument(f"count {count}")
        return count

    return Option(parse, str(default), f"an integer from {least} to {most}")


def choice_option(default: str, *others: str) -> Option:
    """One of some words, the default first."""
    words = (default, *others)

    def parse(value: Any) -> str:
        if value not in words:
            raise InvalidArgument(str(value))
        return str(value)

    return Option(parse, default, f"one of {', '.join(words)}")


def flag_option(default: str) -> Option:
    """True or false."""

    def parse(value: Any) -> bool:
        if not isinstance(value, (bool, str)) or value not in (True, False, "true", "false"):
            raise InvalidArgument(repr(value))
        return value in (True, "true")

    return Option(parse, default, "true or false")


def share_option(default: str, *, is_above_zero: bool = False) -> Option:
    """A number from 0 to 1. `is_above_zero`: 0 would refuse everything, and is none of them."""

    def parse(value: Any) -> float:
        share = float(value) if isinstance(value, str) else value
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not is_number or not 0.0 <= share <= 1.0 or (is_above_zero and not share):
            raise InvalidArgument(repr(value))
        return float(share)

    return Option(parse, default, "a number above 0, at most 1" if is_above_zero else "a number from 0 to 1")


def lack_of_mooncake(extra: str) -> str:
    """A clause where Mooncake's package, of the extra so called, is not installed here; empty where it is."""
    is_there = importlib.util.find_spec("mooncake") is not None
    way = f"install kvpool[{extra}], or for the Debian package what its pages say, into /usr/local/lib/kvpool"
    return "" if is_there else f"mooncake-transfer-engine is not installed: {way}"


def lack_of_nixl() -> str:
    """A clause where NIXL's package is not installed here; empty where it is."""
    is_there = any(importlib.util.find_spec(package) is not None for package in NIXL_PACKAGES)
    return "" if is_there else f"{' or '.join(NIXL_PACKAGES)} is not installed: install kvpool[nixl]"


def _plain_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(repr(value))
    return value
