"""Tiering: all links of an arena as one, the link of the fastest lower tier first; after them those to remote tiers, and that
to a tier of copies above it.

Without links it is the null object: nothing moves, and no caller asks whether there is a lower tier. Control thread only.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import kvpool_native
from kvpool.checks.checksum_jobs import ChecksumJobs
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.tiering.link import Link
from kvpool.tiering.placed_run import PlacedRun
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiers.base import ArenaTier, BackingTier, Counters, Headers, Info
from kvpool.tiers.copies import CopyTier
from kvpool.tiers.remote import NOBODY, Asker, RemoteTier
from kvpool.tiers.slots import Slots
from kvpool.types import DURATION_BYTES, HoldId, Level, RetainState

_UNPROTECTED = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class RunBelow:
    """A lower tier's run of some chunks: the number of leading ones, and a hold on them there (0: none)."""

    chunks: int
    hold: HoldId
    link: Link


@dataclass(frozen=True, slots=True)
class RunElsewhere:
    """A remote tier's run of some chunks, which are pulled from there."""

    run: PlacedRun
    link: RemoteLink


@dataclass(frozen=True, slots=True)
class RetainedBelow:
    """Chunks that a lower tier has, with the priority and duration of each there."""

    link: Link
    keys: KeyColumn
    priorities: bytes
    durations: bytes


class Tiering:
    """See the module."""

    def __init__(
        self,
        arena: ArenaTier,
        links: Sequence[Link],
        clock: Clock,
        remotes: Sequence[RemoteLink] = (),
        *,
        copies: Sequence[CopyLink] = (),
    ) -> None:
        self._directory = arena.directory
        self.links = tuple(links)
        self.remotes = tuple(remotes)
        self.copies = tuple(copies)
        self._tier_set = kvpool_native.TierSet((arena.directory, *self.directories))
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Tiering {', '.join(link.lower.name for link in self.links) or 'of one tier'}>"

    def __bool__(self) -> bool:
        return bool(self.links)

    @property
    def directories(self) -> list[kvpool_native.Directory]:
        """The directories of the lower tiers, the fastest first."""
        return [link.lower.slots.directory for link in self.links]

    def count_chunks(self) -> int:
        """Chunks that the arena or a lower tier has, each counted once: in the last tier of those that have it."""
        return sum(directory.count_unsaved() for directory in (self._directory, *self.directories))

    @property
    def corrupt_in_arena(self) -> int:
        """Chunks that were found bad in the arena when they were to be moved to another tier, and dropped."""
        return sum(link.demotions.corrupt_chunks for link in self.links) + sum(
            link.corrupt_chunks for link in self.copies
        )

    @property
    def slots(self) -> list[Slots]:
        """The slots of the tiers beside the arena that have a directory here, the fastest first."""
        return [*(link.tier.slots for link in self.copies), *(link.lower.slots for link in self.links)]

    @property
    def names(self) -> dict[Level, str]:
        """The names of these tiers, by level."""
        return {slots.level: slots.name for slots in self.slots}

    @property
    def checksum_jobs(self) -> list[ChecksumJobs]:
        """What compares their chunks with checksums."""
        upper = [link.checksum_jobs for link in self.copies]
        return [*upper, *(link.checksum_jobs for link in self.links)]

    @property
    def holds(self) -> int:
        """Holds that promotions and pulls have in the arena's directory."""
        return sum(link.promotions.holds for link in self.links) + sum(remote.holds for remote in self.remotes)

    @property
    def pins(self) -> int:
        """Pins that demotions and copies have in the arena's directory."""
        return sum(link.demotions.pins for link in self.links) + sum(link.pins for link in self.copies)

    def start(self) -> None:
        """Begin to open every tier, in the background."""
        for link in self.links:
            link.start()
        for remote in self.remotes:
            remote.start()
        for copies in self.copies:
            copies.start()

    async def close(self) -> bool:
        """Close every tier and settle its jobs. False: a device or the network does not answer, and is abandoned."""
        own = [copies.close() for copies in self.copies] + [link.close() for link in self.links]
        ended = await asyncio.gather(*own, *(link.remote.close() for link in self.remotes))
        return all(ended)

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on."""
        for link in self.links:
            link.lower.reconfigure(config)
            link.change_admission()
        for remote in self.remotes:
            remote.remote.reconfigure(config)

    def find(self, namespace: Namespace, keys: KeyColumn, chunks: int, *, parent: bytes) -> RunBelow | None:
        """The longest run of the chunks after `parent` in one lower tier; None unless longer than the arena's `chunks`."""
        found: RunBelow | None = None
        for link in self.links:
            run = link.promotions.find(namespace, keys, chunks, parent=parent)
            is_longer = run.chunks > (chunks if found is None else found.chunks)
            given_up = RunBelow(*run, link)
            if is_longer:
                given_up, found = found or RunBelow(0, HoldId(0), link), given_up
            self.give_up(given_up)
        return found

    def missing(self, keys: KeyColumn) -> KeyColumn:
        """Those of these chunks that neither the arena has nor a lower tier that can be read."""
        for directory in (self._directory, *(link.lower.slots.directory for link in self.links if link.lower.can_read)):
            keys = KeyColumn.of([key for key in keys if not directory.place_of(key)[1]])
        return keys

    def give_up(self, run: RunBelow | None) -> None:
        """Release the hold of a run that is not promoted."""
        if run is not None and run.hold:
            run.link.lower.slots.directory.release(run.hold, self._clock.now_ns())

    def promote(self, run: RunBelow, wanted: Wanted) -> int:
        """Promote chunks of a run: how many leading ones are in the arena or being promoted. Takes over the run's hold."""
        return run.link.promotions.promote(wanted, run.hold, self._clock.now_ns())

    def find_elsewhere(
        self,
        namespace: Namespace,
        keys: KeyColumn,
        first: int,
        *,
        asker: Asker = NOBODY,
        is_urgent: bool = True,
        is_chained: bool = True,
    ) -> RunElsewhere | None:
        """The best run of chunks from number `first` on that one node seems to have, the longest of all remote tiers; None
        where there is none. `keys`: of a chain from its root, or of chunks without a parent. A node that the request names, and
        that can be asked, seems to have all of them."""
        found: RunElsewhere | None = None
        for link in self.remotes:
            run = link.find(namespace, keys, first, asker)
            if run.end > (first if found is None else found.run.run.end):
                found = RunElsewhere(PlacedRun(namespace, keys, run, is_urgent, asker, is_chained), link)
        return found

    def place(self, elsewhere: RunElsewhere, first: int, end: int) -> int:
        """Give chunks of a run slots: how many leading ones are in the arena or on their way. `start_pull` is to follow."""
        return elsewhere.link.place(elsewhere.run, first, end, self._clock.now_ns())

    def start_pull(self, elsewhere: RunElsewhere) -> bool:
        """Start to pull what was placed of a run. False where that cannot be now: then its slots are given up."""
        return elsewhere.link.start_pull(elsewhere.run, self._clock.now_ns())

    def run(self) -> None:
        """Start demotions that are due."""
        for link in self.links:
            link.run()

    def make_room(self) -> bool:
        """Start to demote the coldest chunks. Whether any job is under way whose end may make room."""
        moving = [link.make_room() for link in self.links]
        read_for_peers = any(link.promotions.for_peers.taken for link in self.links)
        is_pinned = any(link.pins for link in self.copies)
        return any(moving) or read_for_peers or is_pinned or any(remote.holds for remote in self.remotes)

    def protecting(self, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which no chunk is evicted that only the arena has, if a lower tier can soon take it."""
        if is_wanted and self.links and any(link.can_take for link in self.links):
            return self._protecting()
        return _UNPROTECTED

    @contextlib.contextmanager
    def _protecting(self) -> Iterator[None]:
        self._directory.protect_unsaved(True)
        try:
            yield
        finally:
            self._directory.protect_unsaved(False)

    def demote(self, namespace: Namespace, parent: bytes, keys: KeyColumn, now_ns: int) -> None:
        """Start to write those of these chunks that lower tiers lack, as far as room and budget allow."""
        for link in self.links:
            link.demotions.write(namespace, parent, keys, now_ns)

    def retained(self, keys: KeyColumn) -> list[RetainedBelow]:
        """Chunks of these that lower tiers have, with their retention there."""
        found = []
        for link in self.links:
            retention = link.lower.slots.directory.retention
            kept = [(key, *one) for key in keys if (one := retention(key)) is not None]
            if kept:
                durations = b"".join(duration.to_bytes(DURATION_BYTES, "little") for _, _, duration in kept)
                priorities = bytes(priority for _, priority, _ in kept)
                found.append(RetainedBelow(link, KeyColumn.of(key for key, _, _ in kept), priorities, durations))
        return found

    def restore_retention(self, namespace: Namespace, retained: Sequence[RetainedBelow], now_ns: int) -> None:
        """Set the retention of chunks in lower tiers to what it was."""
        for one in retained:
            directory = one.link.lower.slots.directory
            directory.retain(namespace.id, one.keys.packed, one.priorities, one.durations, now_ns)

    def remember_retention(self, keys: KeyColumn, states: bytes) -> None:
        """Record for a restart the retention of those chunks that lower tiers have.

        `states`: a `RetainState` for each key. An ABSENT one is skipped: it may be another namespace's chunk.
        """
        if not self.links:
            return
        chosen = [key for key, state in zip(keys, states, strict=True) if state != RetainState.ABSENT]
        for link in self.links:
            link.remember_retention(chosen)

    def keep_up(self) -> None:
        """Record for a restart which chunks have left the lower tiers, and which priorities have expired there."""
        for link in self.links:
            link.lower.keep_up()

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """Broken invariants of every link, one line each."""
        lower = [problem for link in self.links for problem in link.verify(with_shared=with_shared)]
        upper = [problem for link in self.copies for problem in link.verify(with_shared=with_shared)]
        return upper + lower + [problem for remote in self.remotes for problem in remote.verify()]

    def stats(self) -> dict[str, Counters]:
        """Counters of each lower tier, by its name."""
        return {link.lower.name: link.stats() for link in self.links}

    def upper_stats(self) -> dict[str, Counters]:
        """Counters of each tier of copies, by its name."""
        return {link.tier.name: link.stats() for link in self.copies}

    def remote_stats(self) -> dict[str, Counters]:
        """Counters of each remote tier, by its name."""
        return {remote.remote.name: remote.stats() for remote in self.remotes}

    def info(self) -> Info:
        """The resources in use, for operators."""
        found: Info = {}
        for tier in self._tiers:
            found |= tier.info()
        return found

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""
        return [problem for tier in self._tiers for problem in tier.problems()]

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing, one line each. Any thread."""
        return [line for tier in self._tiers for line in tier.shortcomings()]

    @property
    def headers(self) -> dict[Level, Headers]:
        """The readers of token ids of the lower tiers that store them, by level."""
        return {link.lower.level: link.lower.headers for link in self.links if link.lower.headers is not None}

    def names_beside(self, arena: str) -> list[str]:
        """The names of all tiers with the arena's, the fastest first."""
        upper = [link.tier.name for link in self.copies]
        return [*upper, arena, *(tier.name for tier in self._tiers[len(upper) :])]

    @property
    def _tiers(self) -> list[CopyTier | BackingTier | RemoteTier]:
        tiers: list[CopyTier | BackingTier | RemoteTier] = [link.tier for link in self.copies]
        tiers += [link.lower for link in self.links]
        return tiers + [link.remote for link in self.remotes]
