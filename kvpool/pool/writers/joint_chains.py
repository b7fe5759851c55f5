"""Joint chains: the chains of incomplete chunks, by key, by activity and by age, and how much of DRAM they take.

A chunk takes its slot, which may be far more than its bytes. It counts for the connection whose part was the first one of it:
that has at most a share of what the others leave, so that an engine of which a rank is gone leaves some to others.

Decides nothing and calls no directory: `joint_saves` does. Control thread only; `now_ns` is an argument.

Invariant: `_chunks` has exactly the chunks of `_chains` that are not published, but for expired ones; `_by_activity` and
`_by_age` have the chains that are not expired, in the order of their `active_ns` and `began_ns`; `incomplete_chunks` and
`incomplete_bytes` count the chunks of all chains that are not published, and `_bytes_of` by connection.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from itertools import pairwise
from operator import attrgetter

from kvpool.ids import ConnectionId, NamespaceId, ReservationId
from kvpool.index.joint_chunks import JointChain, JointChunk, Part
from kvpool.index.namespaces import Namespace

# Checksums of incomplete chunks are in the daemon's own memory: 64 MiB for so many extents.
EXTENTS_MAX = 1 << 24


class JointChains:
    """See the module. Incomplete chunks have at most `bytes_max`, and of that a connection at most `share` of what the others
    leave; 1: all of it."""

    def __init__(self, bytes_max: int, share: float) -> None:
        self._bytes_max = bytes_max
        self._share = share
        self._chains: dict[ReservationId, JointChain] = {}
        self._by_activity: OrderedDict[ReservationId, JointChain] = OrderedDict()
        self._by_age: OrderedDict[ReservationId, JointChain] = OrderedDict()
        self._chunks: dict[tuple[NamespaceId, bytes], JointChunk] = {}
        self._extents = 0  # of incomplete chunks
        self._bytes_of: Counter[ConnectionId] = Counter()
        self.incomplete_bytes = 0
        self.incomplete_chunks = 0

    def __repr__(self) -> str:
        return f"<JointChains {len(self._chains)}, {self.incomplete_chunks} chunks>"

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, chain: JointChain) -> bool:
        return chain.reservation in self._chains

    def find(self, namespace: NamespaceId, key: bytes) -> JointChunk | None:
        """The incomplete chunk with this key, if it has not expired."""
        return self._chunks.get((namespace, key))

    def room_for(self, owner: ConnectionId, own: Namespace, slot_bytes: int) -> int:
        """How many more chunks of a namespace may be incomplete for a connection."""
        taken = self._bytes_of[owner]
        left = self._bytes_max - self.incomplete_bytes
        if self._share < 1:
            left = min(left, int((left + taken) * self._share) - taken)
        return max(0, min(left // slot_bytes, (EXTENTS_MAX - self._extents) // own.layout.extents))

    def open(self, reservation: int, own: Namespace, parent: bytes, now_ns: int, *, slot_bytes: int) -> JointChain:
        """A new chain without chunks, over a reservation of the directory."""
        chain = JointChain(ReservationId(reservation), own.id, parent, own.layout.extents, slot_bytes, now_ns, now_ns)
        self._chains[chain.reservation] = chain
        self._by_activity[chain.reservation] = chain
        self._by_age[chain.reservation] = chain
        return chain

    def add_chunk(
        self, chain: JointChain, key: bytes, owner: ConnectionId, *, offset: int, generation: int
    ) -> JointChunk:
        """A further chunk of a chain, of which this connection has the first part. REQUIRES: no chain has the key."""
        assert (chain.namespace, key) not in self._chunks
        chunk = JointChunk(key, chain, len(chain.chunks), owner, offset, generation)
        chain.chunks.append(chunk)
        self._chunks[chain.namespace, key] = chunk
        self._count(chain, [chunk], 1)
        return chunk

    def note_active(self, chain: JointChain, now_ns: int) -> None:
        """A part of a chain is reserved or stored."""
        if chain.active_ns < now_ns:
            chain.active_ns = now_ns
            self._by_activity.move_to_end(chain.reservation)

    def publish(self, chain: JointChain, count: int, now_ns: int) -> None:
        """The next `count` chunks of a chain are published."""
        if not count:
            return
        chunks = chain.chunks[chain.published : chain.published + count]
        for chunk in chunks:
            del self._chunks[chain.namespace, chunk.key]
            chunk.checksums, chunk.tokens = None, b""
        chain.published += count
        chain.began_ns = now_ns
        self._by_age.move_to_end(chain.reservation)
        self._count(chain, chunks, -1)

    def next_due(self, idle_since_ns: int, began_ns: int) -> JointChain | None:
        """A chain that nobody has written since, or one that began before."""
        idle = next(iter(self._by_activity.values()), None)
        if idle is not None and idle.active_ns <= idle_since_ns:
            return idle
        oldest = next(iter(self._by_age.values()), None)
        return oldest if oldest is not None and oldest.began_ns <= began_ns else None

    def hide(self, chain: JointChain) -> None:
        """Have the keys of chunks that are not published found no more."""
        if not chain.is_expired:
            del self._by_activity[chain.reservation], self._by_age[chain.reservation]
            for chunk in chain.chunks[chain.published :]:
                del self._chunks[chain.namespace, chunk.key]

    def forget_chain(self, chain: JointChain) -> None:
        """Forget a chain, whose slots nobody writes."""
        assert not chain.open
        self.hide(chain)
        del self._chains[chain.reservation]
        self._count(chain, chain.chunks[chain.published :], -1)

    def verify(self, parts: Collection[Part]) -> list[str]:
        """Broken invariants, one line each. `parts`: all that may write chunks."""
        problems = []
        writing: dict[int, int] = {}
        open_of: dict[int, int] = {}
        for part in parts:
            for chunk in part.next():
                problems += ["joint saves: two parts write an extent"] * bool(writing.get(id(chunk), 0) & part.mask)
                writing[id(chunk)] = writing.get(id(chunk), 0) | part.mask
                open_of[id(chunk.chain)] = open_of.get(id(chunk.chain), 0) + 1
        for chain in self._chains.values():
            left, name = chain.chunks[chain.published :], f"chain {chain.reservation}"
            is_written = [chunk.writing == writing.get(id(chunk), 0) for chunk in left]
            if chain.open != open_of.get(id(chain), 0) or not all(is_written):
                problems.append(f"joint saves: what is written of {name} is miscounted")
            if any(chunk.writing & chunk.stored for chunk in left):
                problems.append(f"joint saves: a stored extent of {name} is being written")
            is_found = [self._chunks.get((chain.namespace, chunk.key)) is chunk for chunk in left]
            if any(is_found) if chain.is_expired else not all(is_found):
                problems.append(f"joint saves: chunks of {name} are not found by their keys")
        return problems + self._verify_counts()

    def _verify_counts(self) -> list[str]:
        problems = []
        living = [chain.reservation for chain in self._chains.values() if not chain.is_expired]
        for order, field in ((self._by_activity, "active_ns"), (self._by_age, "began_ns")):
            times = [attrgetter(field)(chain) for chain in order.values()]
            if sorted(living) != sorted(order) or any(one > other for one, other in pairwise(times)):
                problems.append(f"joint saves: chains are missing by {field}, or out of order")
        counted = (self.incomplete_chunks, self.incomplete_bytes, self._extents)
        rows = [(chain.incomplete, chain) for chain in self._chains.values()]
        found = (
            sum(count for count, _ in rows),
            sum(count * chain.slot_bytes for count, chain in rows),
            sum(count * chain.extents for count, chain in rows),
        )
        if found != counted:
            problems.append(f"joint saves: {found} chunks, bytes and extents are incomplete, {counted} are counted")
        bytes_of: Counter[ConnectionId] = Counter()
        for chain in self._chains.values():
            for chunk in chain.chunks[chain.published :]:
                bytes_of[chunk.owner] += chain.slot_bytes
        if bytes_of != self._bytes_of:
            problems.append("joint saves: incomplete bytes of a connection are miscounted")
        if len(self._chunks) != sum(self._chains[number].incomplete for number in living):
            problems.append(f"joint saves: {len(self._chunks)} chunks are found by keys, more than chains have")
        return problems

    def _count(self, chain: JointChain, chunks: list[JointChunk], sign: int) -> None:
        """Count chunks of a chain as incomplete, or no longer."""
        self.incomplete_chunks += sign * len(chunks)
        self.incomplete_bytes += sign * len(chunks) * chain.slot_bytes
        self._extents += sign * len(chunks) * chain.extents
        for owner, count in Counter(chunk.owner for chunk in chunks).items():
            self._bytes_of[owner] += sign * count * chain.slot_bytes
            if not self._bytes_of[owner]:
                del self._bytes_of[owner]
        assert self.incomplete_chunks >= 0
