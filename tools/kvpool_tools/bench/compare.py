"""Comparison of a benchmark's rows with an earlier document (`--out`) of the same machine: what got slower.

A figure is a column that has a spread beside it (`save_ratio`, `save_ratio_spread`), and few that are measured once. Rows with
a ratio to a floor of the same run have no other times compared than CPU times: the machine may be busier than it was. A figure
is slower where it is worse by more than a bound, its earlier value lies outside its spread, and it outside the earlier one's.

Pure but for reading the document; any thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgument

Row = Mapping[str, Any]
# What distinguishes rows, where they have it.
KEYS = (
    *("part", "name", "trace", "write_mode", "way", "chunk", "chunks", "chunk_bytes", "layers", "head_groups"),
    *("streams", "threads", "tokens", "clients", "requests", "capacity_bytes"),
)
MEASURED_ONCE = ("instructions", "rss_mib", "bytes_per_chunk")
RATIOS = ("ratio", "times_floor", "share_of_read", "round_trips")
# Ends of the names of figures of which more is better.
MORE = ("ratio", "share_of_read", "_per_s", "_per_cpu_s")
SLOWER, FASTER, SAME = "slower", "faster", "same"


@dataclass(frozen=True, slots=True)
class Terms:
    """How figures are compared: what of the machine must be equal (of Python's version all but the patch), and the bound."""

    machine: tuple[str, ...]
    bound: float


TIMES = Terms(("processor", "cores", "architecture", "python"), 1.10)
# Of instructions: they are the same on any processor, and two runs differ by one or two in a hundred.
COUNTS = Terms(("architecture", "python"), 1.05)


class Earlier:
    """An earlier document. `fault`: why it says nothing about this run; empty where it does."""

    def __init__(self, path: str, terms: Terms, machine: Mapping[str, Any], *, is_quick: bool = False) -> None:
        """Raises InvalidArgument for a file that is no document of a benchmark."""
        self.path, self._terms, self.fault = path, terms, ""
        try:
            document = json.loads(Path(path).read_text())
            self._rows = {_identity(row): dict(row) for row in document["rows"]}
            there = {name: _kind(document["machine"], name) for name in terms.machine}
            was_quick = bool(document.get("is_quick"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"--against is {path}, expected a document of kvpoolctl bench: {error}") from error
        for name, value in there.items():
            if value != (here := _kind(machine, name)):
                self.fault = f"its {name} is {value}, and {here} here"
        if was_quick != is_quick:
            self.fault = "one of both is of --quick"

    def compare(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """A row for each figure that both have: as it was, as it is, its ratio to what it was, and the verdict."""
        if self.fault:
            return []
        pairs = ((row, self._rows.get(_identity(row))) for row in rows)
        return [
            self._compared(row, before, figure)
            for row, before in pairs
            if before is not None
            for figure in _figures(row)
            if row[figure] and before.get(figure)
        ]

    def _compared(self, row: Row, before: Row, figure: str) -> dict[str, Any]:
        now, then = float(row[figure]), float(before[figure])
        ratio = now / then
        worse = 1 / ratio if figure.endswith(MORE) else ratio
        is_beyond = not _has(row, figure, then) and not _has(before, figure, now)
        bound = self._terms.bound
        verdict = SAME
        if is_beyond and max(worse, 1 / worse) > bound:
            verdict = SLOWER if worse > 1 else FASTER
        return {
            "row": ", ".join(str(value) for _, value in _identity(row)),
            "figure": figure,
            "before": before[figure],
            "now": row[figure],
            "ratio": round(ratio, 3),
            "bound": bound,
            "verdict": verdict,
        }


def _identity(row: Row) -> tuple[tuple[str, object], ...]:
    return tuple((name, row[name]) for name in KEYS if name in row)


def _kind(machine: Mapping[str, Any], name: str) -> object:
    value = machine[name]
    return value.rpartition(".")[0] if name == "python" else value


def _spreads(row: Row) -> dict[str, Sequence[float]]:
    """By figure: `save_ratio_spread` is that of `save_ratio`, `spread_gb_per_s` that of `gb_per_s`. Counts have one without a
    name: they are bound alone."""
    found = {column.replace("_spread", "").replace("spread_", ""): row[column] for column in row if "spread" in column}
    return {figure: spread for figure, spread in found.items() if figure != "spread"}


def _figures(row: Row) -> list[str]:
    figures = [name for name in _spreads(row) if name in row]
    has_floor = any(name.endswith(RATIOS) for name in figures)
    kept = [name for name in figures if not has_floor or name.endswith(RATIOS) or "cpu" in name]
    return kept + [name for name in MEASURED_ONCE if name in row]


def _has(row: Row, figure: str, value: float) -> bool:
    """Whether the figure's spread has the value; never where it has none."""
    low, high = _spreads(row).get(figure, (value + 1, value))
    return low <= value <= high
