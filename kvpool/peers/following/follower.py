"""Follower: keeps the table of remote chunks as one peer reports its own: a snapshot of all keys, and then each change.

    snapshot ──last page──► changes ──gap──► back-off, snapshot       another life of the peer: snapshot
        └─ link lost, refused, false answer, too slow ──► back-off, and again where it was

Pages and changes are asked for one after the other, so that every answer is as of a later moment than what was noted before it;
changes since the first page are applied after it, which makes whole what a page could not yet know.

One request at a time, each with a deadline, and never sooner than `interval_s` after the former one. After a failure the next
attempt waits, longer each time; that begins anew only after a while without one. What was noted stays meanwhile, for `kept_s`;
then the peer's hints are forgotten.

Only events change hints: a late answer takes none away, and at rest the table has what the owner has.

Loop thread only. Invariants: the peer is a node of the table exactly while `is_joined`; `_last` is the event as of which the
table has the peer's keys, None where a snapshot is needed, and `_saves` the note about its saves; `_stale` is the end of the
time for which hints are kept, None while all is well; `_leaving` is set only between attempts.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpool.clock import Clock, Deadline
from kvpool.errors import KVPoolError
from kvpool.index.remote_chunks import NodeName
from kvpool.key_column import KeyColumn
from kvpool.peers.back_off import BackOff, BackOffSettings, Uniform
from kvpool.peers.control import records as r
from kvpool.peers.control.link import PeerLink
from kvpool.peers.following.remote_feed import RemoteFeed

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", r.Changes, r.Keys)


class FollowFault(KVPoolError):
    """A peer cannot be followed at this moment: a gap, or answers that are none of an honest node."""


@dataclass(frozen=True, slots=True)
class FollowSettings:
    """Bounds of followers.

    `wait_s`: of a request for changes; `answer_s`: beyond that. `snapshot_s`: of a whole snapshot. `kept_s`: hints of a peer
    that cannot be followed. `settled_s`: without a failure, before the next one counts as the first. `asked_per_s`: requests
    of all followers together; `peer_asked_per_s`: of one.
    """

    wait_s: float = 10.0
    answer_s: float = 6.0
    snapshot_s: float = 300.0
    kept_s: float = 60.0
    settled_s: float = 5.0
    asked_per_s: float = 500.0
    peer_asked_per_s: float = 50.0
    back_off: BackOffSettings = field(default_factory=BackOffSettings)

    def __post_init__(self) -> None:
        assert 0 < self.wait_s * 1000 <= r.WAIT_MS_MAX
        assert min(self.answer_s, self.snapshot_s, self.kept_s) > 0


@dataclass(slots=True)
class FollowCounts:
    """Counters of one peer. `last` and `newest`: ids of the latest event noted, and of the peer's latest."""

    snapshots: int = 0
    gaps: int = 0
    failures: int = 0
    last: int = -1
    newest: int = -1

    @property
    def lag(self) -> int:
        """Events of the peer that are not noted yet."""
        return max(0, self.newest - self.last)


class Follower:
    """See the module. `link`: the one that is followed now; `member`: whose it is, or was last. `fault`: why the last attempt
    ended."""

    def __init__(
        self,
        node: NodeName,
        feed: RemoteFeed,
        interval_s: Callable[[], float],
        *,
        settings: FollowSettings,
        clock: Clock,
        random: Uniform,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.node = node
        self._feed = feed
        self._interval_s = interval_s
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._back_off = BackOff(settings.back_off, random)
        self._retry = self._next_ask = Deadline(0.0, clock)
        self._stale: Deadline | None = None
        self._incarnation = b""
        self._last: int | None = None
        self._saves = 0
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self.link: PeerLink | None = None
        self.member = ""
        self.is_joined = False
        self.counts = FollowCounts()
        self.fault = ""

    def __repr__(self) -> str:
        return f"<Follower {self.node}, event {self._last} of {self.counts.newest}, {self.fault or 'no fault'}>"

    @property
    def is_current(self) -> bool:
        """Whether the table has what the peer has, as of an event of its life: no snapshot is needed."""
        return self._last is not None

    def begin_following(self, link: PeerLink) -> None:
        """Follow over a link that is ready."""
        assert link.life is not None
        self.pause()
        self.link, self.member = link, link.member.identity
        if link.life.incarnation != self._incarnation:
            self._incarnation, self._last = link.life.incarnation, None
            self.counts.last = self.counts.newest = -1
            if self.is_joined:
                self._feed.remote.clear(self.node)
                self._feed.schedule_turn()
        self._task = self._loop.create_task(self._run(link))
        self._task.add_done_callback(self._note_end)

    def pause(self) -> None:
        """The link is no longer ready: keep what is known for a while."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.link is not None:
            self.fault = self.link.fault
        self.link = None
        self._leave_later()

    def end_following(self) -> None:
        """Follow no more, and forget the peer's hints."""
        self.pause()
        self._leave()

    async def _run(self, link: PeerLink) -> None:
        while True:
            await asyncio.sleep(self._retry.remaining_s())
            self._stay()
            try:
                await self._follow(link)
            except KVPoolError as error:
                self.fault = str(error)
                self.counts.failures += 1
            self._leave_later()
            self._retry = Deadline(self._back_off.fail(), self._clock)

    async def _follow(self, link: PeerLink) -> None:
        """Until something is wrong: raises KVPoolError."""
        if self._last is None:
            self._last = await self._take_snapshot(link)
        settled = Deadline(self._settings.settled_s, self._clock)
        while True:
            half_wait = Deadline(self._settings.wait_s / 2, self._clock)
            before = self._last, self._saves
            changes = await self._ask_changes(link, self._last, self._settings.wait_s)
            is_empty = (changes.last, changes.saves) == before and not changes.stored and not changes.removed
            if is_empty and not half_wait.has_passed():
                raise FollowFault(f"{self.node} reports no changes, and does not wait for any")
            self._last, self._stale = changes.last, None
            if settled.has_passed():
                self._back_off.succeed()
                self.fault = ""

    async def _take_snapshot(self, link: PeerLink) -> int:
        """Note all keys of the peer. Returns the event as of which it has them."""
        if self.is_joined:
            self._feed.remote.clear(self.node)
        else:
            self._feed.remote.join(self.node)
            self.is_joined = True
        self._stale, self._saves = None, 0
        self._feed.schedule_turn()
        self.counts.snapshots += 1
        deadline = Deadline(self._settings.snapshot_s, self._clock)
        cursor, last = 0, -1
        while cursor != r.NO_MORE_KEYS:
            page = await self._ask(link, r.AskKeys(cursor), r.Keys, self._settings.answer_s)
            last = last if cursor else page.as_of
            self.counts.newest = max(self.counts.newest, page.as_of)
            await self._note(page.keys, is_stored=True)
            while last < page.as_of:
                changes = await self._ask_changes(link, last, 0.0)
                if changes.last == last:
                    raise FollowFault(f"{self.node} has a page of keys as of event {page.as_of}, and none after {last}")
                last = changes.last
                self._check_time(deadline)
            self._check_time(deadline)
            cursor = page.cursor
        self.counts.last = last
        return last

    def _check_time(self, deadline: Deadline) -> None:
        if deadline.has_passed():
            raise FollowFault(f"the snapshot of {self.node} had no end within {self._settings.snapshot_s:g} s")

    async def _ask_changes(self, link: PeerLink, last: int, wait_s: float) -> r.Changes:
        """Ask for changes, and note them. Raises FollowFault for a gap."""
        ask = r.AskChanges(last, int(wait_s * 1000), self._saves)
        changes = await self._ask(link, ask, r.Changes, wait_s + self._settings.answer_s)
        self.counts.newest = changes.newest
        if changes.is_gap:
            self._last = None
            self.counts.gaps += 1
            raise FollowFault(f"{self.node} no longer has the events after {last}")
        await self._note(changes.removed, is_stored=False)
        await self._note(changes.stored, is_stored=True)
        self.counts.last, self._saves = changes.last, changes.saves
        return changes

    async def _ask(self, link: PeerLink, ask: r.AskFollow, expected: type[Answer], timeout_s: float) -> Answer:
        await asyncio.sleep(self._next_ask.remaining_s())
        self._next_ask = Deadline(self._interval_s(), self._clock)
        answer: Any = await link.request(ask, timeout_s)
        assert isinstance(answer, expected), "the link checks that an answer is one to its request"
        return answer

    async def _note(self, keys: bytes, *, is_stored: bool) -> None:
        if keys:
            column = KeyColumn(keys)
            await self._feed.queue_change(self.node, column, is_stored=is_stored, timeout_s=self._settings.answer_s)

    def _stay(self) -> None:
        """An attempt begins: hints are not forgotten while it lasts."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _leave_later(self) -> None:
        """An attempt has ended: forget the hints `kept_s` after the first failure since all was well."""
        if not self.is_joined or self._leaving is not None:
            return
        self._stale = self._stale or Deadline(self._settings.kept_s, self._clock)
        self._leaving = self._loop.call_later(self._stale.remaining_s(), self._leave)

    def _leave(self) -> None:
        self._stay()
        self._last = self._stale = None
        if self.is_joined:
            self._feed.remote.leave(self.node)
            self.is_joined = False
            self._feed.schedule_turn()

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault = f"{type(error).__name__}: {error}"
            log.error("the follower of %s has ended: %s", self.node, self.fault, exc_info=error)
            self._leave_later()
