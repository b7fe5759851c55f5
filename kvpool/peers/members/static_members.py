"""Static members: those that the configuration lists. They never change. Any thread."""

from collections.abc import Iterable

from kvpool.clock import Clock
from kvpool.peers.members.member import BookSettings, Member, MemberBook, OnChange, parse_member


class StaticMembers:
    """A list as a source of members: reported once, by `start`, on its caller's thread."""

    def __init__(self, entries: Iterable[str], on_change: OnChange, *, book: BookSettings, clock: Clock) -> None:
        """`entries`: see `parse_member`. Raises InvalidArgument."""
        self._listed = [parse_member(entry) for entry in entries]
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
        """How many of the listed cannot be used; empty where all can."""
        refused, left_out = self._book.refused, self._book.left_out
        if refused or left_out:
            return f"peers: {refused} listed members have keys that are not allowed, {left_out} are too many"
        return ""

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return self._book.stats()
