"""Timings as columns: medians in milliseconds and ratios by pairs, with their spread. Pure functions."""

from collections.abc import Sequence

from kvpool_tools.bench.measure import median, spread

MS_PER_S = 1e3


def milliseconds(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Columns of a duration: its median in milliseconds, and its spread."""
    found = [value * MS_PER_S for value in seconds]
    return {f"{name}_ms": round(median(found), 3), f"{name}_spread_ms": spread(found, 3)}


def ratios(name: str, longer: Sequence[float], shorter: Sequence[float]) -> dict[str, object]:
    """Columns of a ratio of durations that were taken in pairs: its median, and its spread."""
    found = [one / other for one, other in zip(longer, shorter, strict=True)]
    return {name: round(median(found), 2), f"{name}_spread": spread(found)}
