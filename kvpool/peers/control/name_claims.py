"""Name claims: which life of a node has its name, where keys do not show it: in a fleet that shares one key pair, or has none.

The first one that is seen has it, in either direction: as a node that asks this one, or as one that this one asks. The next one
has it when no connection to the former is left. Loop thread only. Invariant: a name has one life at a time.
"""

from collections.abc import Callable, Iterable

Lives = Callable[[], Iterable[tuple[str, bytes]]]


class NameClaims:
    """See the module. `on_end`: called when a name may have become free."""

    def __init__(self) -> None:
        self._claimed: dict[str, bytes] = {}
        self._sources: list[Lives] = []
        self.on_end: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<NameClaims {len(self._claimed)} names>"

    def watch(self, lives: Lives) -> None:
        """`lives`: names and lives of the nodes that are connected now, in one direction."""
        self._sources.append(lives)

    def claim(self, name: str, life: bytes) -> bool:
        """Whether a name is that of a node in this life, which has it from now on."""
        if self._claimed.get(name, life) != life:
            connected = {one for source in self._sources for one in source()}
            self._claimed = {known: other for known, other in self._claimed.items() if (known, other) in connected}
        return self._claimed.setdefault(name, life) == life
