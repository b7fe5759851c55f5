"""Watch: statistics time and again, for people: one line of the most important ones, or a section whole.

A value that has changed has its change in a second beside it, and hits are a share of what was looked up meanwhile. Nothing
here talks to a daemon or reads a clock. Main thread of a command only.

Invariant: `_before` has the values and the time of the last call, or nothing before the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool.clock import NS_PER_S
from kvpool.units import format_size

Value = int | float | str
Values = Mapping[str, Value]
HEADER_EVERY = 20
HITS, LOOKED_UP, HIT_RATE = "usage.hit_tokens", "usage.lookup_tokens", "usage.hit_rate"
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class _Change:
    """Two readings of the same values, and the seconds between."""

    now: Values
    before: Values
    elapsed_s: float

    def total(self, name: str) -> str:
        """The value as it is now."""
        return str(self.now[name])

    def size(self, name: str) -> str:
        """The value as it is now, with a unit."""
        return format_size(int(self.now[name]))

    def difference(self, name: str) -> float:
        """By how much a number has risen; 0 for words, and for what is new."""
        now, before = self.now[name], self.before.get(name, self.now[name])
        return 0 if isinstance(now, str) or isinstance(before, str) else now - before

    def rate(self, name: str) -> str:
        """The change in a second."""
        return f"{self.difference(name) / self.elapsed_s:.1f}" if self.elapsed_s else _UNKNOWN

    def size_rate(self, name: str) -> str:
        """The change in a second, with a unit; 0 where it was a fall."""
        return format_size(max(0, int(self.difference(name) / self.elapsed_s))) if self.elapsed_s else _UNKNOWN

    def hit_rate(self, _name: str = HITS) -> str:
        """Hits of what was looked up between the two readings."""
        looked_up = self.difference(LOOKED_UP)
        return f"{self.difference(HITS) / looked_up:.1%}" if looked_up > 0 else _UNKNOWN


# Header, width, the statistic and how it is shown, the most important first: together as wide as a terminal at its narrowest.
_COLUMNS: tuple[tuple[str, int, str, Callable[[_Change, str], str]], ...] = (
    ("chunks", 9, "dram.chunks", _Change.total),
    ("used", 10, "dram.used_bytes", _Change.size),
    ("saved/s", 9, "saved_chunks", _Change.rate),
    ("evicted/s", 9, "evicted_chunks", _Change.rate),
    ("loaded/s", 10, "usage.loaded_bytes", _Change.size_rate),
    ("hits", 6, HITS, _Change.hit_rate),
    ("leases", 6, "leases", _Change.total),
    ("saves", 5, "reservations", _Change.total),
    ("clients", 7, "connections", _Change.total),
)


class Watch:
    """See the module. `section` None: one line of the most important values. `width`: of the terminal, in characters."""

    def __init__(self, section: str | None, width: int) -> None:
        self._section = section
        self._columns = [column for number, column in enumerate(_COLUMNS) if _width_up_to(number) <= width]
        self._width = width
        self._before: Values = {}
        self._before_ns = 0
        self._count = 0

    def lines(self, sections: Mapping[str, Values], now_ns: int) -> list[str]:
        """The lines of the statistics as they are now, by section."""
        values = {name: value for of_section in sections.values() for name, value in of_section.items()}
        elapsed_s = (now_ns - self._before_ns) / NS_PER_S if self._before else 0.0
        change = _Change(values, self._before, elapsed_s)
        lines = self._summary(change) if self._section is None else self._all(change, sections[self._section])
        self._before, self._before_ns = values, now_ns
        self._count += 1
        return lines

    def _summary(self, change: _Change) -> list[str]:
        header = " ".join(f"{title:>{width}}" for title, width, _, _ in self._columns)
        line = " ".join(f"{show(change, name):>{width}}" for _, width, name, show in self._columns)
        return [header, line] if self._count % HEADER_EVERY == 0 else [line]

    def _all(self, change: _Change, section: Values) -> list[str]:
        begin = [""] if self._count else []
        return [
            *begin,
            *(f"{name}:{value}{_change_of(change, name)}"[: self._width] for name, value in section.items()),
        ]


def _width_up_to(number: int) -> int:
    return sum(width for _, width, _, _ in _COLUMNS[: number + 1]) + number


def _change_of(change: _Change, name: str) -> str:
    if name == HIT_RATE:
        rate = change.hit_rate()
        return "" if rate == _UNKNOWN else f"  {rate} since the line before"
    difference = change.difference(name)
    if not difference or not change.elapsed_s:
        return ""
    if name.endswith("_bytes"):
        sign = "-" if difference < 0 else "+"
        return f"  {sign}{format_size(int(abs(difference) / change.elapsed_s))}/s"
    return f"  {difference / change.elapsed_s:+.1f}/s"
