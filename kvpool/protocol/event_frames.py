"""Events as routers read them: the messages of vLLM's KV events, in three frames [topic, number, payload].

    payload := msgpack [time in seconds, [event, …], data-parallel rank]      number := u64, big endian, from 0 for each topic
    event   := map {"type": "BlockStored", …}  or  array ["BlockStored", …], see `_stored`

A chunk is one block or, with `block_tokens`, as many as it has of that size; each tier is a medium. An event that gains a tier
is a BlockStored there, one that loses a tier a BlockRemoved; other updates have no word here. Chunks whose token ids are not
known are not told: no router could use them. Of a model over several ranks rank 0 stands for all.

Invariant: no message names a block twice as stored, and none takes more than MESSAGE_BYTES_MAX unless it has a single event.
Any thread; time is an argument.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvpool.layout import Layout
from kvpool.protocol.block_hashes import block_hash, block_hashes, blocks_of
from kvpool.types import Event, EventKind, Level, StoredChunk

MEDIA = {Level.HBM: "GPU", Level.DRAM: "CPU", Level.SSD: "STORAGE", Level.PEER: "EXTERNAL"}
MESSAGE_BYTES_MAX = 64 << 10
MESSAGE_EVENTS_MAX = 256
# Bytes of a token, of a block's hash and of the rest of an event, encoded: estimates from above.
_TOKEN_BYTES, _HASH_BYTES, _EVENT_BYTES = 5, 9, 200

WireEvent = dict[str, Any] | list[Any]
# Finds the model and the layout of a namespace.
NamespaceOf = Callable[[int], tuple[str, Layout]]


@dataclass(frozen=True, slots=True)
class EventForm:
    """How events are told."""

    is_positional: bool = False
    block_tokens: int = 0

    def events_of(self, event: Event, layout: Layout) -> list[WireEvent]:
        """What one event is to a router; nothing where it has no word for it."""
        if event.kind == EventKind.CREATED or layout.rank != 0:
            return []
        blocks = blocks_of(layout.chunk_tokens, self.block_tokens)
        told: list[WireEvent] = []
        if event.tokens:
            told += [self._stored(event, layout.chunk_tokens, blocks, MEDIA[level]) for level in event.gained]
        return told + [self._removed(event, blocks, MEDIA[level]) for level in event.lost]

    def chunk_events(self, chunk: StoredChunk, layout: Layout) -> list[WireEvent]:
        """What a chunk of a snapshot is to a router."""
        event = Event(0, EventKind.STORED, keys=chunk.key, parent=chunk.parent, tokens=chunk.tokens, tiers=chunk.tiers)
        return self.events_of(event, layout)

    def all_cleared(self) -> WireEvent:
        """Nothing of what was told before counts any more."""
        return ["AllBlocksCleared"] if self.is_positional else {"type": "AllBlocksCleared"}

    def _stored(self, event: Event, chunk_tokens: int, blocks: int, medium: str) -> WireEvent:
        hashes = [hash for key in event.chunks for hash in block_hashes(key, blocks)]
        parent = block_hash(event.parent) if event.parent else None
        tokens = np.frombuffer(event.tokens, "<i4").tolist()
        size = chunk_tokens // blocks
        if self.is_positional:
            return ["BlockStored", hashes, parent, tokens, size, None, medium, None]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }

    def _removed(self, event: Event, blocks: int, medium: str) -> WireEvent:
        hashes = [hash for key in event.chunks for hash in block_hashes(key, blocks)]
        if self.is_positional:
            return ["BlockRemoved", hashes, medium]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one message, and its topic."""

    topic: str
    events: tuple[WireEvent, ...]

    def payload(self, wall_time_s: float) -> bytes:
        """The third frame."""
        packed: bytes = msgpack.packb([wall_time_s, list(self.events), 0], use_bin_type=True)
        return packed


def batches(told: Iterable[tuple[str, list[WireEvent]]]) -> list[Batch]:
    """Cuts what is told under topics into messages, in its order."""
    done: list[Batch] = []
    events: list[WireEvent] = []
    stored: set[int] = set()
    topic, size = "", 0
    for name, news in told:
        for event in news:
            hashes, event_bytes = _stored_hashes(event), _bytes_of(event)
            is_full = size + event_bytes > MESSAGE_BYTES_MAX or len(events) == MESSAGE_EVENTS_MAX
            if events and (name != topic or is_full or stored & hashes):
                done.append(Batch(topic, tuple(events)))
                events, size, stored = [], 0, set()
            topic = name
            events.append(event)
            size += event_bytes
            stored |= hashes
    if events:
        done.append(Batch(topic, tuple(events)))
    return done


def _stored_hashes(event: WireEvent) -> set[int]:
    kind = event["type"] if isinstance(event, Mapping) else event[0]
    if kind != "BlockStored":
        return set()
    return set(event["block_hashes"] if isinstance(event, Mapping) else event[1])


def _bytes_of(event: WireEvent) -> int:
    values = event.values() if isinstance(event, Mapping) else event
    lists = [value for value in values if isinstance(value, list)]
    return (
        _EVENT_BYTES + _HASH_BYTES * len(lists[0] if lists else ()) + sum(_TOKEN_BYTES * len(one) for one in lists[1:])
    )
