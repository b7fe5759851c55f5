"""Remote chunks: which node has which chunk, as the nodes' events report it, in the table that clients read beside the index.

What it has is a hint: a node may have dropped a chunk since, a full table evicts its oldest pairs, and two keys may have one
fingerprint. A chunk key is derived from model, layout, rank and salt, so keys need no namespace here.

A node among others has at most its share, an equal part of the room: what it announces beyond that is not noted until chunks of
its own have gone, so that nobody who announces without end evicts what others have. A node alone evicts its own oldest.

Each life of a node has an owner number of its own: `clear` ends it at once, however much it has, and the table is emptied of it
in turns. Changes are applied in turns too: `note_stored` and `note_removed` queue them, `advance` applies a bounded number of
keys of each node in turn. A queue that is full takes nothing: the reader of that node's events continues after the next turn.

A node that was asked for a chunk and did not have it may be about to have it, or have it for engines of another model or
layout: its announcement stays, as events have it. `runs` passes over it for a while, for engines of the namespace that was
declined, or until the node announces the chunk again.

Control thread only; no I/O, no clock. Invariants: `_by_owner` has exactly the nodes whose owner number is live; `pending_keys`
of a node is the number of keys in its queue.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, NewType

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.ids import NamespaceId
from kvpool.index.parts import Parts
from kvpool.key_column import KeyColumn

NodeName = NewType("NodeName", str)

# Keys applied and buckets emptied in one turn: about 0.3 ms in a table beyond the caches (measured: 60 ns for a new key).
KEYS_A_TURN = 4096
BUCKETS_A_TURN = 4096
# Keys in the queue of one node: 2 MiB.
PENDING_KEYS_MAX = 65_536
# For so long a chunk that a node did not have is not asked of it, and so many of one node: a chain ends with the first of them.
DECLINED_NS = 3 * NS_PER_S
DECLINED_MAX = 1024


class RemoteRun(NamedTuple):
    """A run of consecutive chunks that one node has."""

    node: NodeName
    chunks: int


# Nanoseconds for each MiB, and microseconds before: not known.
NO_PACE = (0, 0)


class _Change(NamedTuple):
    keys: KeyColumn
    is_stored: bool


@dataclass(slots=True)
class _Node:
    """A node that is followed. `owner`: None until a number is free for its life. `declined`: chunks that it did not have, by
    the namespace for which it was asked, with the end of the time for which it is not asked again; the oldest first."""

    owner: int | None = None
    pending: deque[_Change] = field(default_factory=deque)
    pending_keys: int = 0
    pace: tuple[int, int] = NO_PACE
    declined: dict[tuple[NamespaceId, bytes], int] = field(default_factory=dict)


class RemoteChunks:
    """See the module."""

    def __init__(self, pairs: int, epoch: bytes, seed: bytes = b"") -> None:
        """Room for `pairs` pairs of chunk and node, 10 bytes each. `seed` places the keys; empty: drawn.

        Raises OSError where there is no memory.
        """
        buckets = kvpool_native.RemoteIndex.buckets_for(pairs)
        self.mapping = kvpool_native.Mapping.create("kvpool-remote", kvpool_native.RemoteIndex.bytes_of(buckets))
        self._table = kvpool_native.RemoteIndex(self.mapping, buckets, epoch, seed)
        self.mapping.seal_read_only()
        self._pairs = pairs
        self._nodes: dict[NodeName, _Node] = {}
        self._by_owner: dict[int, NodeName] = {}
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<RemoteChunks {self._table.count}/{self._table.capacity} of {len(self._nodes)} nodes>"

    def __len__(self) -> int:
        """Pairs of chunk and node that are known."""
        return self._table.count

    def join(self, node: NodeName) -> None:
        """Follow a node, of which nothing is known yet."""
        assert node not in self._nodes
        self._nodes[node] = _Node()
        self._number(node)

    def leave(self, node: NodeName) -> None:
        """Forget a node with everything it has."""
        self._retire(node)
        del self._nodes[node]

    def clear(self, node: NodeName) -> None:
        """Forget everything a node has, as for its new life or before its snapshot. Queued changes are dropped too."""
        self._retire(node)
        self._nodes[node] = _Node(pace=self._nodes[node].pace)
        self._number(node)

    def note_stored(self, node: NodeName, keys: KeyColumn) -> bool:
        """Queue chunks that a node has, from its events or its snapshot. False, and nothing is done, where its queue is full:
        call `advance` first."""
        declined = self._nodes[node].declined
        if declined:
            named = set(keys)
            for again in [pair for pair in declined if pair[1] in named]:
                del declined[again]
        return self._queue(node, _Change(keys, is_stored=True))

    def note_removed(self, node: NodeName, keys: KeyColumn) -> bool:
        """Queue chunks that a node has no more; as `note_stored`."""
        return self._queue(node, _Change(keys, is_stored=False))

    def advance(self) -> bool:
        """Apply a turn's work. Whether another turn can do more."""
        has_dead = self._table.sweep(BUCKETS_A_TURN)
        left = KEYS_A_TURN
        for name in list(self._nodes):
            left -= self._apply(name, left)
            if not left:
                self._nodes[name] = self._nodes.pop(name)  # the others come first in the next turn
                break
        return has_dead or any(node.pending and node.owner is not None for node in self._nodes.values())

    def decline(self, node: NodeName, namespace: NamespaceId, key: bytes, now_ns: int) -> None:
        """A node that was asked for a chunk of a namespace did not have it: it is not asked again for a while."""
        found = self._nodes.get(node)
        if found is not None:
            found.declined.pop((namespace, key), None)
            found.declined[namespace, key] = now_ns + DECLINED_NS
            for pair in list(takewhile(lambda pair: found.declined[pair] <= now_ns, found.declined)):
                del found.declined[pair]
            if len(found.declined) > DECLINED_MAX:
                del found.declined[next(iter(found.declined))]

    def runs(
        self,
        keys: KeyColumn,
        first: int,
        avoid: Container[NodeName] = (),
        *,
        namespace: NamespaceId | None = None,
        now_ns: int = 0,
    ) -> list[RemoteRun]:
        """The runs of chunks from key `first` on that one node has each, other than those to avoid, the longest first. From
        local knowledge. A run ends before what the node has just declined to engines of the namespace."""
        usable = []
        for owner, chunks in self._table.runs(keys.packed, first):
            node = self._by_owner[owner]
            if node not in avoid:
                declined = self._declined_by(node, namespace, now_ns)
                end = keys[first : first + chunks].find_any(declined) if declined else chunks
                usable += [RemoteRun(node, end)] if end else []
        return sorted(usable, key=lambda run: -run.chunks)

    def keys_by_node(
        self, keys: KeyColumn, avoid: Container[NodeName], *, namespace: NamespaceId, now_ns: int
    ) -> dict[NodeName, list[int]]:
        """Which of these keys each node has, other than those to avoid. From local knowledge; without what the node has just
        declined to engines of the namespace."""
        found = {}
        for owner, numbers in self._table.keys_by_owner(keys.packed):
            node = self._by_owner[owner]
            if node not in avoid:
                declined = self._declined_by(node, namespace, now_ns)
                having = [number for number in numbers if keys[number] not in declined] if declined else numbers
                if having:
                    found[node] = having
        return found

    def set_pace(self, node: NodeName, pace: tuple[int, int]) -> None:
        """Show readers how long chunks of a node take, where it is followed: nanoseconds for each MiB, microseconds before."""
        found = self._nodes.get(node)
        if found is not None:
            found.pace = pace
            if found.owner is not None:
                self._table.set_pace(found.owner, *pace)

    def count_of(self, node: NodeName) -> int:
        """Chunks of a node that are known."""
        owner = self._nodes[node].owner
        return 0 if owner is None else self._table.count_of(owner)

    def pending_of(self, node: NodeName) -> int:
        """Keys in a node's queue."""
        return self._nodes[node].pending_keys

    def stats(self) -> dict[str, int]:
        """Counters by name: pairs known, room for them, pairs evicted by newer ones, keys that wait in queues, and those left
        out because their node had its share."""
        return {
            "chunks": self._table.count,
            "chunks_max": self._table.capacity,
            "evicted_chunks": self._table.evicted,
            "pending_keys": sum(node.pending_keys for node in self._nodes.values()),
            "left_out_chunks": self._left_out,
        }

    def compare_shared(self) -> Parts[list[str]]:
        """Check the table part by part: broken invariants, one line each. A forked child cannot: it has no mapping."""
        cursor, broken = self._table.verify_part(0, BUCKETS_A_TURN)
        problems = broken
        while cursor:
            yield None
            cursor, broken = self._table.verify_part(cursor, BUCKETS_A_TURN)
            problems += broken
        return problems

    def verify(self) -> list[str]:
        """Recount everything at once: broken invariants, one line each."""
        problems = self._table.verify()
        if {node.owner: name for name, node in self._nodes.items() if node.owner is not None} != self._by_owner:
            problems.append("remote chunks: an owner number has another node, or none")
        for name, node in self._nodes.items():
            if node.pending_keys != sum(len(change.keys) for change in node.pending):
                problems.append(f"remote chunks: the queue of {name} has another number of keys than was counted")
        if sum(self._table.count_of(owner) for owner in self._by_owner) != self._table.count:
            problems.append("remote chunks: the table has chunks of nodes that are not followed")
        return problems

    def _queue(self, name: NodeName, change: _Change) -> bool:
        node = self._nodes[name]
        if node.pending and node.pending_keys + len(change.keys) > PENDING_KEYS_MAX:
            return False
        if change.keys:
            node.pending.append(change)
            node.pending_keys += len(change.keys)
        return True

    def _declined_by(self, node: NodeName, namespace: NamespaceId | None, now_ns: int) -> set[bytes]:
        declined = self._nodes[node].declined
        return {key for (of, key), end_ns in declined.items() if of == namespace and end_ns > now_ns}

    def _apply(self, name: NodeName, most: int) -> int:
        """Apply at most so many keys of a node's queue. Returns how many."""
        node = self._nodes[name]
        if node.owner is None:
            self._number(name)
        if node.owner is None:
            return 0
        applied = 0
        while node.pending and applied < most:
            keys, is_stored = node.pending.popleft()
            now, rest = keys[: most - applied], keys[most - applied :]
            if is_stored:
                self._insert(node.owner, now)
            else:
                self._table.remove(node.owner, now.packed)
            if rest:
                node.pending.appendleft(_Change(rest, is_stored))
            applied += len(now)
        node.pending_keys -= applied
        return applied

    def _insert(self, owner: int, keys: KeyColumn) -> None:
        """Insert what fits the node's share. Where it is almost full, chunks known before may be left out too: they stay."""
        room = len(keys)
        if len(self._nodes) > 1:
            room = max(0, self._pairs // len(self._nodes) - self._table.count_of(owner))
        self._left_out += max(0, len(keys) - room)
        if room:
            self._table.insert(owner, keys[:room].packed)

    def _number(self, name: NodeName) -> None:
        """Give a node's life an owner number, if one is free."""
        owner = self._table.add_owner()
        if owner is not None:
            node = self._nodes[name]
            node.owner = owner
            if node.pace != NO_PACE:
                self._table.set_pace(owner, *node.pace)
            self._by_owner[owner] = name

    def _retire(self, name: NodeName) -> None:
        owner = self._nodes[name].owner
        if owner is not None:
            self._table.retire(owner)
            del self._by_owner[owner]
