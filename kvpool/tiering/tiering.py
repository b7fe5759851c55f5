"""Tiering: all links of an arena as one, that of the fastest tier first.

Without links it is the null object: nothing moves, and no caller asks whether there is a tier beside the arena. Control thread
only.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import kvpool_native
from kvpool.checks.checksum_jobs import ChecksumJobs
from kvpool.clock import Clock
from kvpool.config.config import Config
from kvpool.ids import DURATION_BYTES, HoldId
from kvpool.index.namespaces import Namespace
from kvpool.key_column import KeyColumn
from kvpool.states import Level, RetainState
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.tiering.link import Link, StockedLink
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.placed_run import PlacedRun
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.remote_link import RemoteLink
from kvpool.tiers.base import ArenaTier, Counters, Headers, Info, Tier
from kvpool.tiers.remote import NOBODY, Asker
from kvpool.tiers.slots import Slots

_UNPROTECTED = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class RunBelow:
    """A lower tier's run of some chunks: the number of leading ones, and a hold on them there (0: none)."""

    chunks: int
    hold: HoldId
    link: LowerLink


@dataclass(frozen=True, slots=True)
class RunElsewhere:
    """A remote tier's run of some chunks, which are pulled from there."""

    run: PlacedRun
    link: RemoteLink


@dataclass(frozen=True, slots=True)
class RetainedBelow:
    """Chunks that a lower tier has, with the priority and duration of each there."""

    link: LowerLink
    keys: KeyColumn
    priorities: bytes
    durations: bytes


class Tiering:
    """See the module. `links`: all of them; `lower`, `remotes`, `copies`: those of a kind."""

    def __init__(self, arena: ArenaTier, links: Sequence[Link[Tier]], clock: Clock) -> None:
        levels = [link.tier.level for link in links]
        assert len(set(levels)) == len(levels), "two tiers have one level"
        self.links = sorted(links, key=lambda link: link.tier.level)
        self.lower = [link for link in self.links if isinstance(link, LowerLink)]
        self.remotes = [link for link in self.links if isinstance(link, RemoteLink)]
        self.copies = [link for link in self.links if isinstance(link, CopyLink)]
        self._stocked = [link for link in self.links if isinstance(link, StockedLink)]
        self._directory = arena.directory
        self._tier_set = kvpool_native.TierSet((arena.directory, *self.directories))
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Tiering {', '.join(link.tier.name for link in self.links) or 'of one tier'}>"

    def __bool__(self) -> bool:
        return bool(self.lower)

    @property
    def directories(self) -> list[kvpool_native.Directory]:
        """The directories of the lower tiers, the fastest first."""
        return [link.slots.directory for link in self.lower]

    def count_chunks(self) -> int:
        """Chunks that the arena or a lower tier has, each counted once: in the last tier of those that have it."""
        return sum(directory.count_unsaved() for directory in (self._directory, *self.directories))

    @property
    def corrupt_in_arena(self) -> int:
        """Chunks that were found bad in the arena when they were to be moved to another tier, and dropped."""
        return sum(link.corrupt_in_arena for link in self.links)

    @property
    def slots(self) -> list[Slots]:
        """The slots of the tiers beside the arena that have a directory here, the fastest first."""
        return [link.slots for link in self._stocked]

    @property
    def checksum_jobs(self) -> list[ChecksumJobs]:
        """What compares their chunks with checksums."""
        return [link.checksum_jobs for link in self._stocked]

    @property
    def holds(self) -> int:
        """Holds that promotions and pulls have in the arena's directory."""
        return sum(link.holds for link in self.links)

    @property
    def pins(self) -> int:
        """Pins that demotions and copies have in the arena's directory."""
        return sum(link.pins for link in self.links)

    def start(self) -> None:
        """Begin to open every tier, in the background."""
        for link in self.links:
            link.start()

    async def close(self) -> bool:
        """Close every tier and settle its jobs. False: a device or the network does not answer, and is abandoned."""
        return all(await asyncio.gather(*(link.close() for link in self.links)))

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on."""
        for link in self.links:
            link.reconfigure(config)

    def find(self, namespace: Namespace, keys: KeyColumn, chunks: int, *, parent: bytes) -> RunBelow | None:
        """The longest run of the chunks after `parent` in one lower tier; None unless longer than the arena's `chunks`."""
        found: RunBelow | None = None
        for link in self.lower:
            run = link.promotions.find(namespace, keys, chunks, parent=parent)
            is_longer = run.chunks > (chunks if found is None else found.chunks)
            given_up = RunBelow(*run, link)
            if is_longer:
                given_up, found = found or RunBelow(0, HoldId(0), link), given_up
            self.give_up(given_up)
        return found

    def missing(self, keys: KeyColumn) -> KeyColumn:
        """The keys whose chunks neither the arena has nor a lower tier that can be read."""
        for directory in (self._directory, *(link.slots.directory for link in self.lower if link.tier.can_read)):
            keys = KeyColumn.of([key for key in keys if not directory.place_of(key)[1]])
        return keys

    def give_up(self, run: RunBelow | None) -> None:
        """Release the hold of a run that is not promoted."""
        if run is not None and run.hold:
            run.link.slots.directory.release(run.hold, self._clock.now_ns())

    def promote(self, run: RunBelow, wanted: Wanted) -> int:
        """Promote chunks of a run: how many leading ones are in the arena or being promoted. Takes over the run's hold."""
        return run.link.promotions.promote(wanted, run.hold, self._clock.now_ns())

    def keep_each(self, namespace: Namespace, keys: KeyColumn) -> list[Callable[[], None]]:
        """Keep those of these chunks that are alone from leaving the lower tiers that have them: what ends that, for each."""
        pins = [(link.promotions, link.promotions.keep_each(namespace, keys)) for link in self.lower]
        return [partial(promotions.let_go, pin) for promotions, pin in pins if pin]

    def bring_each(self, wanted: Wanted, asker: Asker | None) -> set[int]:
        """Start to bring chunks that are alone from the lower tiers that have them, then from other nodes: the numbers of those
        that any has. In the arena or on its way is what has got a slot. `asker`: for whom other nodes are asked; None: none is.
        """
        now_ns = self._clock.now_ns()
        ways: list[Callable[[Wanted], list[int]]] = [
            partial(link.promotions.promote_each, now_ns=now_ns) for link in self.lower
        ]
        if asker is not None:
            ways += [partial(link.pull_each, asker=asker, now_ns=now_ns) for link in self.remotes]
        found: set[int] = set()
        for bring in ways:
            left = [number for number in range(len(wanted.keys)) if number not in found]
            if left:
                found.update(left[at] for at in bring(replace(wanted, keys=wanted.keys.chosen(left))))
        return found

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
        for link in self.lower:
            link.run()

    def make_room(self) -> bool:
        """Start to demote the coldest chunks. Whether any job is under way whose end may make room."""
        moving = [link.make_room() for link in self.links]
        return any(moving)

    def protecting(self, is_wanted: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which no chunk is evicted that only the arena has, if a lower tier can soon take it."""
        if is_wanted:
            for link in self.lower:
                if link.can_take:
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
        for link in self.lower:
            link.demotions.write(namespace, parent, keys, now_ns)

    def retained(self, keys: KeyColumn) -> list[RetainedBelow]:
        """Chunks of these that lower tiers have, with their retention there."""
        found = []
        for link in self.lower:
            retention = link.slots.directory.retention
            kept = [(key, *one) for key in keys if (one := retention(key)) is not None]
            if kept:
                durations = b"".join(duration.to_bytes(DURATION_BYTES, "little") for _, _, duration in kept)
                priorities = bytes(priority for _, priority, _ in kept)
                found.append(RetainedBelow(link, KeyColumn.of(key for key, _, _ in kept), priorities, durations))
        return found

    def restore_retention(self, namespace: Namespace, retained: Sequence[RetainedBelow], now_ns: int) -> None:
        """Set the retention of chunks in lower tiers to what it was."""
        for one in retained:
            directory = one.link.slots.directory
            directory.retain(namespace.id, one.keys.packed, one.priorities, one.durations, now_ns)

    def remember_retention(self, keys: KeyColumn, states: bytes) -> None:
        """Record for a restart the retention of those chunks that lower tiers have.

        `states`: a `RetainState` for each key. An ABSENT one is skipped: it may be another namespace's chunk.
        """
        if not self.lower:
            return
        chosen = [key for key, state in zip(keys, states, strict=True) if state != RetainState.ABSENT]
        for link in self.lower:
            link.remember_retention(chosen)

    def keep_up(self) -> None:
        """Record for a restart which chunks have left the lower tiers, and which priorities have expired there."""
        for link in self.lower:
            link.tier.keep_up()

    def verify(self, *, with_shared: bool = True) -> list[str]:
        """Broken invariants of every link, one line each."""
        return [problem for link in self.links for problem in link.verify(with_shared=with_shared)]

    def stats(self) -> dict[str, Counters]:
        """Counters of each tier, by its name."""
        return {link.tier.name: link.stats() for link in self.links}

    def info(self) -> Info:
        """The resources in use, for operators."""
        found: Info = {}
        for link in self.links:
            found |= link.tier.info()
        return found

    def problems(self) -> list[str]:
        """Problems that a restart of the daemon may solve, one line each. Any thread."""
        return [problem for link in self.links for problem in link.tier.problems()]

    def shortcomings(self) -> list[str]:
        """Configured parts that are missing, one line each. Any thread."""
        return [line for link in self.links for line in link.tier.shortcomings()]

    @property
    def headers(self) -> dict[Level, Headers]:
        """The readers of token ids of the lower tiers that store them, by level."""
        return {link.tier.level: headers for link in self.lower if (headers := link.tier.headers) is not None}

    @property
    def names(self) -> dict[Level, str]:
        """The names of all tiers beside the arena, by level, the fastest first."""
        return {link.tier.level: link.tier.name for link in self.links}
