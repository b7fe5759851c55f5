"""Statistics of one half of the connector, in the form that vLLM gathers, adds up and logs.

Plain numbers by name, added by name; the counts between two steps travel once. One thread for each half.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby

Number = int | float

# vLLM's names for where hits come from, by tier.
HIT_SOURCES = {"hbm": "DEVICE", "dram": "HOST", "ssd": "DISK", "peer": "P2P", "store": "EXTERNAL_UNSPECIFIED"}


class KVPoolStats:
    """Numbers of one interval. Has the methods of vLLM's `KVConnectorStats`. Invariant: no number is negative."""

    def __init__(self, data: Mapping[str, Number] | None = None) -> None:
        self.data: dict[str, Number] = dict(data or {})

    def __repr__(self) -> str:
        return f"<KVPoolStats {self.data}>"

    def count(self, name: str, amount: Number = 1) -> None:
        """Count."""
        assert amount >= 0
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def to_dict(self) -> dict[str, Number]:
        """The numbers, in their serialized form."""
        return self.data

    def reset(self) -> None:
        """Set every number to 0."""
        self.data = {}

    def aggregate(self, other: "KVPoolStats") -> "KVPoolStats":
        """The sums of both."""
        for name, amount in other.data.items():
            self.count(name, amount)
        return self

    def reduce(self) -> dict[str, Number]:
        """The numbers, for a log line."""
        return {f"kvpool_{name}": round(amount, 6) for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Tally:
    """Counts for one half: since its start, and since vLLM last took them. `has_news`: whether there are any of the latter."""

    def __init__(self) -> None:
        self.totals = KVPoolStats()
        self.has_news = False
        self._unsent = KVPoolStats()

    def count(self, name: str, amount: Number = 1) -> None:
        """Count."""
        self.totals.count(name, amount)
        self._unsent.count(name, amount)
        self.has_news = self.has_news or amount > 0

    def take_counts(self) -> KVPoolStats | None:
        """Counts since the last call; None if there are none."""
        if not self.has_news:
            return None
        taken, self._unsent, self.has_news = self._unsent, KVPoolStats(), False
        return taken


def by_level(prefix: str, levels: bytes, tokens: int) -> Iterator[tuple[str, int]]:
    """Counter names and tokens for chunks at `levels`, `tokens` each."""
    for level in sorted(set(levels)):
        yield f"{prefix}_{LEVEL_NAMES[level]}", levels.count(level) * tokens


def sources_of(tiers: bytes, tokens: int, skipped: int, chunk_tokens: int) -> dict[str, int]:
    """How many of the `tokens` after the first chunk's `skipped` ones come from each tier."""
    sources: dict[str, int] = {}
    begin = skipped
    for level, run in groupby(tiers):
        count = min(sum(1 for _ in run) * chunk_tokens - begin, tokens)
        begin, tokens = 0, tokens - count
        if count > 0:
            sources[LEVEL_NAMES[level]] = sources.get(LEVEL_NAMES[level], 0) + count
    return sources


LEVEL_NAMES = ("hbm", "dram", "ssd", "peer", "store")


def engine_sources(found: Mapping[str, int], tokens: int) -> dict[str, int]:
    """The tokens of a load by vLLM's names of where hits come from; of an unknown place where they are not all of them."""
    if sum(found.values()) != tokens:
        return {"EXTERNAL_UNSPECIFIED": tokens} if tokens else {}
    return {HIT_SOURCES[name]: count for name, count in found.items()}
