"""Publications: which chunks of DRAM are put into the shared store, and when.

A chunk qualifies by the policy `store.publish`, and is published once it is on disk; without an SSD tier, once it is stored:

    reused     a lease of it was granted
    retained   its priority is above the default
    all        every chunk

What qualifies is known from the journal's events and from leases. A chunk that a lease named before it was on disk is
remembered. So is for PUBLISHED_S what the store has: it drops objects by itself, and loses them with a node's client or a
master. After that, a chunk that is used again is due again. Whatever is due is asked for before it is sent, because another
node, or this one in an earlier life, may have published it: AT_ONCE chunks in one question, one question at a time. A new life
of the store's process lacks the objects of the one before: nothing counts as published then. A chunk that is used again while
it is under way is sent again only if that fails.

Every queue and memory is bounded, the oldest out first: what is left out is published at its next use. Nothing waits for a
publication. Control thread only, in turns of TURN_KEYS. Invariant: each chunk under way has one pin in the arena's directory.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import partial

import numpy as np

import kvpool_native
from kvpool.clock import NS_PER_S, Clock
from kvpool.events import Event, EventKind
from kvpool.ids import HoldId, NamespaceId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.journal.journal import Journal
from kvpool.key_column import KeyColumn
from kvpool.states import DEFAULT_PRIORITY, NODE_TIERS, Level, levels_in
from kvpool.tiers.base import Moves, Outcome
from kvpool.tiers.store.tier import PUBLISHED_CHUNKS_MAX, StoreTier

TURN_KEYS = 256
EVENTS_BYTES_MAX = 64 << 10
# Chunks of one publication: 10 µs of the control thread each.
AT_ONCE = 16
DUE_MAX = 16_384
MEMORY_MAX = 65_536
USES_MAX = 256  # leases whose chunks were not looked at yet
# How long a chunk counts as published: hot ones cost a question in this time, lost ones come back after it (guess).
PUBLISHED_S = 300.0
# When to look again at what is due while the store cannot take it: nothing reports the end of its suspension.
RETRY_S = 1.0


class _Memory:
    """Keys for a time, the oldest out first."""

    def __init__(self, clock: Clock, seconds: float | None = None) -> None:
        """`seconds` None: until they are discarded or crowded out."""
        self._clock = clock
        self._ns = None if seconds is None else int(seconds * NS_PER_S)
        self._keys: OrderedDict[bytes, int] = OrderedDict()  # and when each was added

    def __contains__(self, key: bytes) -> bool:
        added_ns = self._keys.get(key)
        return added_ns is not None and (self._ns is None or self._clock.now_ns() - added_ns < self._ns)

    def add_key(self, key: bytes) -> None:
        """Remember a key, from now on."""
        self._keys[key] = self._clock.now_ns()
        self._keys.move_to_end(key)
        if len(self._keys) > MEMORY_MAX:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """Forget a key."""
        self._keys.pop(key, None)


class Publications:
    """See the module. `lower`: the directories of the tiers between DRAM and the store."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        lower: Iterable[kvpool_native.Directory],
        store: StoreTier,
        *,
        namespaces: Namespaces,
        journal: Journal,
        policy: str,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._lower = tuple(lower)
        self._store = store
        self._namespaces = namespaces
        self._journal = journal
        self._policy = policy
        self._last = journal.newest
        self._uses: deque[tuple[NamespaceId, KeyColumn]] = deque(maxlen=USES_MAX)
        self._due: OrderedDict[bytes, NamespaceId] = OrderedDict()
        self._clock = clock
        self._used = _Memory(clock)
        self._published = _Memory(clock, PUBLISHED_S)
        self._life = store.process.lives  # of the store, in which they were published
        self._turn: asyncio.Handle | None = None
        self._is_asking = False
        self._pins: dict[bytes, HoldId] = {}  # of the chunks under way
        self._left_out = 0
        if policy != "off":
            journal.listen(self._wake, dict, list)
            store.on_room = self._wake
        store.policy_stats = self.stats

    def __repr__(self) -> str:
        return f"<Publications {self._policy}, {len(self._due)} due, {len(self._pins)} under way>"

    @property
    def pins(self) -> int:
        """Pins in the arena's directory."""
        return len(self._pins)

    def note_lease(self, holds: Iterable[tuple[Namespace, HoldId]]) -> None:
        """A lease with these holds was granted: its chunks are used again."""
        if self._policy == "off":
            return
        self._uses.extend((one.id, KeyColumn(self._directory.keys_of([hold]))) for one, hold in holds)
        self._wake()

    def stats(self) -> dict[str, int]:
        """Counters, by name: chunks that are about to be published, and those left out because too many were."""
        return {
            "due_chunks": len(self._due),
            "publishing_chunks": len(self._pins),
            "unpublished_left_out": self._left_out,
        }

    def _wake(self) -> None:
        if isinstance(self._turn, asyncio.TimerHandle):
            self._turn.cancel()
            self._turn = None
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Look at some of what has happened, and start some of what is due."""
        self._turn = None
        if (life := self._store.process.lives) != self._life:
            self._life, self._published = life, _Memory(self._clock, PUBLISHED_S)
        has_more = self._take_events()
        has_more |= self._take_uses()
        has_more |= self._start_some()
        if has_more:
            self._wake()
        elif self._due and not self._pins:
            self._turn = asyncio.get_running_loop().call_later(RETRY_S, self._take_turn)

    def _take_events(self) -> bool:
        found = self._journal.since(b"", self._last, EVENTS_BYTES_MAX)
        events = () if found.is_gap else found.events
        self._last = self._journal.newest if found.is_gap else found.last
        for event in events:
            if event.kind in (EventKind.STORED, EventKind.UPDATED) and event.is_of_node:
                self._take_event(event)
        return bool(events) and self._last < self._journal.newest

    def _take_event(self, event: Event) -> None:
        levels = levels_in(event.tiers & NODE_TIERS)
        if Level.DRAM not in levels or (self._lower and len(levels) == 1):
            return
        is_retained = self._policy == "retained" and event.priority > DEFAULT_PRIORITY
        for key in event.column:
            if self._policy == "all" or is_retained or (self._policy == "reused" and key in self._used):
                self._make_due(NamespaceId(event.namespace), key)

    def _take_uses(self) -> bool:
        """Look at leased chunks, some at a time."""
        if not self._uses:
            return False
        namespace, keys = self._uses.popleft()
        now, rest = keys[:TURN_KEYS], keys[TURN_KEYS:]
        for key in now:
            self._take_use(namespace, key)
        if rest:
            self._uses.appendleft((namespace, rest))
        return bool(self._uses)

    def _take_use(self, namespace: NamespaceId, key: bytes) -> None:
        if key in self._published:
            return
        if self._policy == "retained":
            kept = self._directory.retention(key)
            if kept is None or kept[0] <= DEFAULT_PRIORITY:
                return
        if self._lower and all(lower.retention(key) is None for lower in self._lower):
            self._used.add_key(key)
        else:
            self._make_due(namespace, key)

    def _make_due(self, namespace: NamespaceId, key: bytes) -> None:
        if key in self._published or key in self._due:
            return
        if len(self._due) >= DUE_MAX:
            self._due.popitem(last=False)
            self._left_out += 1
        self._due[key] = namespace

    def _start_some(self) -> bool:
        """Start to publish chunks of one namespace, the first that are due. Whether more can start now."""
        has_room = len(self._pins) <= PUBLISHED_CHUNKS_MAX - AT_ONCE  # for what is asked for now, afterwards
        if not self._due or self._is_asking or not has_room or not self._store.can_publish:
            return False
        keys: list[bytes] = []
        first = NamespaceId(0)
        for key, number in self._due.items():
            if key in self._pins:
                continue  # it is due again if that fails
            first = first if keys else number
            if number != first or len(keys) == AT_ONCE:
                break
            keys.append(key)
        if not keys:
            return False
        for key in keys:
            del self._due[key]
        pinned = [(key, HoldId(self._directory.pin_key(first, key))) for key in keys]
        found = {key: pin for key, pin in pinned if pin}
        if not found:
            return True
        self._pins.update(found)
        self._is_asking = True
        namespace = self._namespaces.by_id(first)
        on_answer = partial(self._take_answer, namespace, list(found), self._store.process.lives)
        self._store.ask_published(namespace, KeyColumn.of(found), on_answer)
        return False  # the answer goes on

    def _take_answer(self, namespace: Namespace, keys: list[bytes], life: int, is_there: bytes) -> None:
        """Put those of these pinned chunks into the store that it does not have."""
        self._is_asking = False
        if self._store.process.lives != life:
            is_there = bytes(len(keys))
        lacking = [key for key, has in zip(keys, is_there, strict=True) if not has]
        for key in set(keys).difference(lacking):
            self._end(key, 0, Outcome.DONE)
        if lacking:
            self._put(namespace, lacking)
        self._wake()

    def _put(self, namespace: Namespace, keys: list[bytes]) -> None:
        columns = self._directory.columns([self._pins[key] for key in keys])
        places = (columns.offsets, columns.slots, columns.generations)
        offsets, slots, generations = (np.frombuffer(column, "<u8").tolist() for column in places)
        none = [0] * len(keys)
        moves = Moves(keys, [b""] * len(keys), none, generations, offsets, slots)

        def on_ended(chunk: int, outcome: Outcome, fault: str) -> None:  # noqa: ARG001 - the tier counts faults
            self._end(keys[chunk], generations[chunk], outcome)

        if not self._store.publish(namespace, moves, on_ended):
            self._left_out += len(keys)
            for key in keys:
                self._unpin(key)

    def _end(self, key: bytes, generation: int, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._published.add_key(key)
            self._used.discard(key)
            self._due.pop(key, None)
        self._unpin(key)
        if outcome is Outcome.BAD_SOURCE:
            self._directory.drop(key, generation)

    def _unpin(self, key: bytes) -> None:
        self._directory.unpin(self._pins.pop(key))
