"""vLLM's form of KV events, as routers read it: messages in three frames [topic, number, payload].

    payload := msgpack [time in seconds, [event, …], data-parallel rank]     number := u64, big endian, one more each of a topic
    event   := map {"type": "BlockStored", …}  or  array ["BlockStored", …], see `_stored`

A chunk is one block or, with `block_tokens`, as many as it has of that size; each tier is a medium. An event that gains a tier
is a BlockStored there, one that loses a tier a BlockRemoved; other updates are not expressed. Chunks whose token ids are not
known are not published: no router could use them. Of a model over several ranks rank 0 stands for all.

An adapter is `lora_name`, and stands in `extra_keys` as it does in vLLM's; a salt's tag stands behind it for the first block
of a prompt, where vLLM has the salt itself. Dynamo reads salts elsewhere: in maps as `cache_salt` of every event; in the
positional form among the `extra_keys` of every event's first block, with a prefix of its own.

Chunks that other nodes have are not this node's, and not published. With places, maps name where the block is, as vLLM does
from 0.32 on: `locality` LOCAL, or REMOTE for what a shared store has; `ownership` is the pool. Dynamo drops events that have
either, so they are for readers that ask for them. The positional form is of readers that know neither.

Invariant: no event names a block twice, and no message takes more than MESSAGE_BYTES_MAX unless it has a single event.
Any thread, an `EventForm` one at a time; time is an argument.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

import kvpool_native
from kvpool.events import Event, EventKind, StoredChunk
from kvpool.layout import Layout
from kvpool.router_events.block_hashes import block_hash, blocks_of, hashes_of
from kvpool.states import Level

MEDIA = {Level.HBM: "GPU", Level.DRAM: "CPU", Level.SSD: "STORAGE", Level.STORE: "EXTERNAL"}
# The tier that has a block, where a router knows several by one medium: the engine's own offloading beside the pool.
OWNERSHIP = "kvpool"
# Before a salt's tag in the positional form: Dynamo's own (ai-dynamo-runtime 1.6.1), which takes it for the whole event.
DYNAMO_SALT = "dynamo-cache-salt:"
MESSAGE_BYTES_MAX = 64 << 10
MESSAGE_EVENTS_MAX = 256
# Bytes of a token, of a block's hash and of the rest of an event, encoded: estimates from above.
_TOKEN_BYTES, _HASH_BYTES, _EVENT_BYTES = 5, 9, 200

# Where token ids stand in an event that has any; what has fewer fields has none.
_TOKENS_AT = 3
# A map or an array of up to so many fields begins with a byte that has their number.
_SHORT, _SHORT_MAP, _SHORT_ARRAY = 15, 0x80, 0x90

WireEvent = dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids of an event, a column of i32: a thousand numbers of Python's for each kilobyte would keep the control thread
    from its requests. A list for who needs one in this process."""

    column: bytes

    def __len__(self) -> int:
        return len(self.column) // 4

    def tolist(self) -> list[int]:
        """The ids."""
        ids: list[int] = np.frombuffer(self.column, "<i4").tolist()
        return ids


class EventForm:
    """The form of events, and what has been published in it: the blocks that chunks have in common are gone with the last of
    them.

    `has_engine_level`: with what engines have in their own memory, level 0. `has_places`: with `locality` and `ownership`.
    """

    def __init__(
        self,
        *,
        is_positional: bool = False,
        block_tokens: int = 0,
        has_engine_level: bool = True,
        has_places: bool = False,
    ) -> None:
        self._is_positional = is_positional
        self._block_tokens = block_tokens
        self._levels = frozenset(MEDIA) - (frozenset() if has_engine_level else {Level.HBM})
        self._has_places = has_places
        self._published = kvpool_native.PublishedBlocks()

    def __repr__(self) -> str:
        return f"<EventForm, {self._published.chunks} chunks of several blocks published>"

    def events_of(self, event: Event, model: str, layout: Layout) -> list[WireEvent]:
        """The wire events of one event; none where this form cannot express it. They are to be published, in this order."""
        if event.kind == EventKind.CREATED or layout.rank != 0:
            return []
        if layout.group is not None and (not layout.group.is_full or layout.group.number):
            return []  # a router would take a window for a prefix, and count a prefix twice
        blocks = blocks_of(layout.chunk_tokens, self._block_tokens)
        outgoing: list[WireEvent] = []
        if event.tokens:
            gained = self._shown(event.gained)
            outgoing += [
                self._stored(event, self._hashes_stored(event, model, blocks, level), level) for level in gained
            ]
        for level in self._shown(event.lost):
            outgoing += self._removed(event, blocks, level)
        return outgoing

    def chunk_events(self, chunk: StoredChunk, model: str, layout: Layout) -> list[WireEvent]:
        """The wire events of a chunk of a snapshot."""
        event = Event(0, EventKind.STORED, keys=chunk.key, parent=chunk.parent, tokens=chunk.tokens, tiers=chunk.tiers)
        return self.events_of(event._replace(adapter=chunk.adapter, salt_tag=chunk.salt_tag), model, layout)

    def all_cleared(self) -> WireEvent:
        """The event that voids all earlier ones of its topic."""
        return ["AllBlocksCleared"] if self._is_positional else {"type": "AllBlocksCleared"}

    def forget_published(self) -> None:
        """All is published again."""
        self._published.clear()

    def _shown(self, levels: tuple[Level, ...]) -> list[Level]:
        return [level for level in levels if level in self._levels]

    def _stored(self, event: Event, hashes: list[int], level: Level) -> WireEvent:
        parent = block_hash(event.parent) if event.parent else None
        tokens = TokenIds(event.tokens)
        size = len(tokens) // len(hashes)
        adapter, salt = event.adapter or None, event.salt_tag.hex()
        extra = _extra_keys(event, len(hashes), f"{DYNAMO_SALT}{salt}" if self._is_positional else "")
        if self._is_positional:
            positional = ["BlockStored", hashes, parent, tokens, size, None, MEDIA[level], adapter]
            return [*positional, extra] if extra else positional
        stored: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": MEDIA[level],
            "lora_name": adapter,
            **self._place_of(level),
        }
        if extra:
            stored["extra_keys"] = extra
        if salt:
            stored["cache_salt"] = salt
        return stored

    def _hashes_stored(self, event: Event, model: str, blocks: int, level: Level) -> list[int]:
        if blocks == 1:
            return hashes_of(event.column, blocks)
        before = event.parent or kvpool_native.derive_root(
            [b"kvpool router blocks", model.encode(), event.adapter.encode(), event.salt_tag]
        )
        return self._published.add(event.keys, before, event.tokens, blocks, level)

    def _removed(self, event: Event, blocks: int, level: Level) -> list[WireEvent]:
        hashes = hashes_of(event.column, 1) if blocks == 1 else self._published.remove(event.keys, level)
        if not hashes:
            return []
        if self._is_positional:
            return [["BlockRemoved", hashes, MEDIA[level]]]
        return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIA[level], **self._place_of(level)}]

    def _place_of(self, level: Level) -> dict[str, str]:
        if not self._has_places:
            return {}
        return {"locality": "REMOTE" if level == Level.STORE else "LOCAL", "ownership": OWNERSHIP}


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one message, and its topic."""

    topic: str
    events: tuple[WireEvent, ...]

    def payload(self, wall_time_s: float) -> bytes:
        """The third frame."""
        packer = msgpack.Packer(use_bin_type=True)
        pieces = [packer.pack_array_header(3), packer.pack(wall_time_s), packer.pack_array_header(len(self.events))]
        pieces += [_encoded(event, packer) for event in self.events]
        pieces.append(packer.pack(0))
        return b"".join(pieces)


def batches(outgoing: Iterable[tuple[str, list[WireEvent]]]) -> list[Batch]:
    """Cuts the events of topics into messages, in order."""
    done: list[Batch] = []
    events: list[WireEvent] = []
    topic, size = "", 0
    for name, news in outgoing:
        for event in news:
            event_bytes = _bytes_of(event)
            is_full = size + event_bytes > MESSAGE_BYTES_MAX or len(events) == MESSAGE_EVENTS_MAX
            if events and (name != topic or is_full):
                done.append(Batch(topic, tuple(events)))
                events, size = [], 0
            topic = name
            events.append(event)
            size += event_bytes
    if events:
        done.append(Batch(topic, tuple(events)))
    return done


def _encoded(event: WireEvent, packer: msgpack.Packer) -> bytes:
    """An event's bytes: what stands before its token ids and behind them is packed in one call each."""
    fields = list(event.items()) if isinstance(event, dict) else event
    name, tokens = "", fields[_TOKENS_AT] if len(fields) > _TOKENS_AT else None
    if isinstance(tokens, tuple):
        name, tokens = tokens
    if not isinstance(tokens, TokenIds):
        whole: bytes = packer.pack(event)
        return whole
    assert len(fields) <= _SHORT
    before, behind = fields[:_TOKENS_AT], fields[_TOKENS_AT + 1 :]
    ids: bytes = kvpool_native.pack_ids(tokens.column)
    if isinstance(event, dict):
        parts = bytes([_SHORT_MAP | len(fields)]), packer.pack(dict(before))[1:], packer.pack(name)
        return b"".join((*parts, ids, packer.pack(dict(behind))[1:]))
    parts = bytes([_SHORT_ARRAY | len(fields)]), packer.pack(before)[1:], b""
    return b"".join((*parts, ids, packer.pack(behind)[1:]))


def _extra_keys(event: Event, blocks: int, dynamo_salt: str) -> list[list[str] | None] | None:
    """Keys besides tokens that distinguish each block from others; None where there are none. `dynamo_salt`: what the first
    block of every event has besides where there is a salt (empty: nothing)."""
    if not event.adapter and not event.salt_tag:
        return None
    every = [event.adapter] if event.adapter else []
    first = [*every]
    if event.salt_tag:
        first += [event.salt_tag.hex()] * (not event.parent) + [dynamo_salt] * bool(dynamo_salt)
    return [first or None, *[every or None] * (blocks - 1)]


def _bytes_of(event: WireEvent) -> int:
    size, lists = _EVENT_BYTES, 0
    for value in event.values() if isinstance(event, dict) else event:
        if isinstance(value, TokenIds):
            size += _TOKEN_BYTES * len(value)
        elif isinstance(value, str):
            size += _HASH_BYTES + len(value.encode())
        elif isinstance(value, list):
            lists += 1
            size += _HASH_BYTES * len(value)
            if lists == 2:  # what distinguishes blocks besides tokens; the first one are the blocks' hashes
                size += sum([_HASH_BYTES + len(name.encode()) for block in value for name in block or ()])
    return size
