"""Member watch: a thread that looks again and again who the members are.

A look that fails leaves the last known members as they are, and the next one comes after a back-off. A source that was away may
have forgotten members, whose own looks come after a back-off too: for a while after its return those that lack stay. Between
looks there is `refresh_s`, with jitter, so that the nodes of a fleet do not ask in one moment.

A look is on a thread of its own, because nothing bounds the time of the system's resolver: one that has not ended within
`look_s` is a failed look, and no other is begun until it has ended. A late answer counts for the turn after it.

The watching thread owns the book; `current`, `problem` and `stats` are for any thread. Never are two looks under way.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvpool.peers.back_off import BackOff, BackOffSettings, Uniform
from kvpool.peers.members.member import Member, MemberBook, MembersUnavailable

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """`refresh_s`: between looks. `look_s`: the time that a whole look may take, whatever it asks."""

    refresh_s: float = 5.0
    look_s: float = 3.0
    back_off: BackOffSettings = field(default_factory=lambda: BackOffSettings(first_s=1.0, most_s=30.0))


class MemberWatch:
    """See the module. `look` returns the listed members, or raises MembersUnavailable or OSError."""

    def __init__(
        self,
        name: str,
        look: Callable[[], Iterable[Member]],
        book: MemberBook,
        *,
        settings: WatchSettings,
        random: Uniform,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`name`: of the source, for messages. `end`: called last on the thread, unless a look is still under way."""
        self._name = name
        self._look = _Look(look)
        self._book = book
        self._settings = settings
        self._random = random
        self._end = end
        self._back_off = BackOff(settings.back_off, random)
        self._problem = ""
        self._refreshes = self._failures = self._late = 0
        self._is_stopping = self._has_new_keys = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-members", daemon=True)

    def __repr__(self) -> str:
        return f"<MemberWatch {self._name}, {self._refreshes} refreshes, {self._failures} failed>"

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look_now(self) -> None:
        """Look without waiting longer. Any thread."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread. Blocks for at most STOP_TIMEOUT_S; not on the loop."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def current(self) -> tuple[Member, ...]:
        """The members known now."""
        return self._book.current()

    def problem(self) -> str:
        """Why the members may be out of date, or cannot be used; empty where neither is so."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._is_stopping:
            return f"peers: the thread that watches {self._name} has died"
        return self._problem or self._book.problem()

    def admit(self, allowed: frozenset[bytes]) -> None:
        """See `Members`."""
        self._book.admit(allowed)
        self._has_new_keys = True
        self.look_now()

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {
            **self._book.stats(),
            "refreshes": self._refreshes,
            "failed_refreshes": self._failures,
            "late_refreshes": self._late,
        }

    def _run(self) -> None:
        while not self._is_stopping:
            wait_s = self._turn()
            self._wake.wait(wait_s)
            self._wake.clear()
        if not self._look.is_under_way:
            self._end()

    def _turn(self) -> float:
        """Look once. Returns the seconds until the next time."""
        self._refreshes += 1
        if self._has_new_keys:  # whether or not the source answers
            self._has_new_keys = False
            self._book.replace(self._book.current())
        try:
            listed = self._look.listed(self._settings.look_s)
        except (MembersUnavailable, OSError) as error:
            self._failures += 1
            self._late += self._look.is_under_way
            if not self._problem:
                log.warning("peers: %s gives no members, the last known ones stay: %s", self._name, error)
            self._problem = (
                f"peers: {self._name} gives no members, {len(self._book.current())} known ones stay: {error}"
            )
            return self._back_off.fail()
        if self._problem:
            log.warning("peers: %s gives members again", self._name)
            self._book.note_return()
        self._problem = ""
        self._back_off.succeed()
        if not self._is_stopping:
            self._book.replace(listed)
        return self._settings.refresh_s * (0.75 + 0.5 * self._random.random())


class _Look:
    """One look at a time, each with a deadline for its waiter."""

    def __init__(self, look: Callable[[], Iterable[Member]]) -> None:
        self._call = look
        self._thread: threading.Thread | None = None
        self._listed: Iterable[Member] | None = None
        self._fault: MembersUnavailable | OSError | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether one has not ended."""
        return self._thread is not None

    def listed(self, timeout_s: float) -> Iterable[Member]:
        """What the look that is under way returns or raises, or a new one. Raises MembersUnavailable where it is late."""
        if self._thread is None:
            self._listed = self._fault = None
            self._thread = threading.Thread(target=self._run, name="kvpool-look", daemon=True)
            self._thread.start()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise MembersUnavailable(f"no whole answer within {timeout_s:g} s")
        self._thread = None
        if self._fault is not None:
            raise self._fault
        assert self._listed is not None, "the thread of a look has died"
        return self._listed

    def _run(self) -> None:
        try:
            self._listed = self._call()
        except (MembersUnavailable, OSError) as error:
            self._fault = error
