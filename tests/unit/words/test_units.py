"""Sizes and durations with units."""

import pytest

from kvpool.errors import InvalidArgument
from kvpool.units import format_duration, format_size, parse_duration, parse_size, write_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("4KiB", 4096), ("1.5 MiB", 3 << 19), ("2gib", 2 << 30), ("3MB", 3_000_000)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0.0), ("250ms", 0.25), ("2m", 120.0), ("1.5h", 5400.0)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MiB", "-1KiB", "1XB", "1 2", "0x10", "nan", "1e3", "१KiB"])
def test_an_invalid_size_is_refused_by_its_value(text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1y", "inf"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration(text)


def test_human_readable_numbers_have_three_digits() -> None:
    assert (format_size(900), format_size(64 << 20), format_size(3 << 40)) == ("900 B", "64.0 MiB", "3.0 TiB")
    assert (format_duration(0.0015), format_duration(90.0), format_duration(2e-6)) == ("1.5 ms", "1.5 m", "2 us")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536 << 20, "1536MiB"),
        (8 << 30, "8GiB"),
        (5 << 40, "5TiB"),
    ],
)
def test_sizes_are_written_as_a_file_has_them(size: int, text: str) -> None:
    assert write_size(size) == text
    assert parse_size(text) == size
