"""Static members: those that the configuration lists. Only the keys that are allowed change. Any thread."""

from collections.abc import Iterable

from kvpool.clock import Clock
from kvpool.peers.members.member import BookSettings, Member, MemberBook, OnChange


class StaticMembers:
    """A list as a source of members: reported once, by `start`, on its caller's thread."""

    def __init__(self, listed: Iterable[Member], on_change: OnChange, *, book: BookSettings, clock: Clock) -> None:
        """`listed`: see `parse_members`."""
        self._listed = list(listed)
        self._book = MemberBook(on_change, book, clock)

    def __repr__(self) -> str:
        return f"<StaticMembers {len(self._listed)} listed>"

    def start(self) -> None:
        """Report them."""
        self._book.replace(self._listed)

    def stop(self) -> None:
        """Nothing runs."""

    def current(self) -> tuple[Member, ...]:
        """The members."""
        return self._book.current()

    def problem(self) -> str:
        """Which of the listed cannot be used; empty where all can."""
        return self._book.problem()

    def admit(self, allowed: frozenset[bytes]) -> None:
        """See `Members`. On its caller's thread, one at a time."""
        self._book.admit(allowed)
        self._book.replace(self._listed)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return self._book.stats()
