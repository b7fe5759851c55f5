"""A router after the wire's description: subscribes, counts, asks for missed messages again, and keeps an index by medium.

Written from the description of vLLM's KV events alone, and sharing no code with the daemon:

    three frames: topic, number (8 bytes, big endian, one more for each of a topic), msgpack [ts, [event, …], dp_rank]
    a jump of the numbers, and the first one that is seen: ask for what is between; a new life begins with AllBlocksCleared
    events as maps with a `type`, or as arrays: BlockStored(block_hashes, parent_block_hash, token_ids, block_size, lora_id,
    medium, lora_name, [extra_keys]), BlockRemoved(block_hashes, medium), AllBlocksCleared(); maps may have fields that a
    router does not know, and lack extra_keys where no block has any; these are a list of strings or null for each block
    replay: DEALER sends [b"", number]; gets [b"", topic, number, payload]…, then [b"", b"", -1, b""]
"""

import contextlib
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

POSITIONAL = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
END = struct.pack(">q", -1)
SEND_TIMEOUT_MS = 500
# Of Dynamo alone: beside the salt, and at the first block of every event.
DYNAMO_SALT = "dynamo-cache-salt:"


def decode(payload: bytes) -> tuple[float, list[dict[str, Any]], int]:
    """The events of a payload, as maps for either form."""
    ts, events, rank = msgpack.unpackb(payload)
    assert isinstance(ts, float)
    return ts, [event if isinstance(event, dict) else _named(event) for event in events], rank


def _named(event: list[Any]) -> dict[str, Any]:
    kind, *values = event
    fields = POSITIONAL[kind]
    assert len(values) == len(fields) or (kind == "BlockStored" and len(values) == len(fields) - 1)
    return {"type": kind, **dict(zip(fields, values, strict=False))}


@dataclass
class Block:
    """A router's knowledge of a block."""

    parent: int | None
    tokens: tuple[int, ...]
    extra: tuple[str, ...] = ()


@dataclass
class Index:
    """Blocks by medium and hash."""

    media: dict[str, dict[int, Block]] = field(default_factory=dict)
    is_strict: bool = True

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event."""
        if event["type"] == "AllBlocksCleared":
            self.media.clear()
            return
        blocks = self.media.setdefault(event["medium"], {})
        hashes = event["block_hashes"]
        assert len(hashes) == len(set(hashes))
        assert all(0 <= value < 1 << 64 for value in hashes)
        if event["type"] == "BlockRemoved":
            for value in hashes:
                assert blocks.pop(value, None) is not None or not self.is_strict
            return
        assert event["type"] == "BlockStored"
        assert event["lora_id"] is None
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(hashes)
        assert parent not in hashes
        if self.is_strict and parent is not None:
            assert any(parent in known for known in self.media.values()), "a block behind one that was never published"
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        assert len(extra_keys) == len(hashes)
        for number, value in enumerate(hashes):
            extra = tuple(key for key in extra_keys[number] or () if not key.startswith(DYNAMO_SALT))
            assert (event["lora_name"] is not None) == (event["lora_name"] in extra)
            blocks[value] = Block(parent, tuple(event["token_ids"][number * size : (number + 1) * size]), extra)
            parent = value

    def prefixes(self) -> dict[str, set[tuple[int, ...]]]:
        """The token ids of a prompt up to the end of each block, for each medium that has any."""
        known = {value: block for blocks in self.media.values() for value, block in blocks.items()}

        def prefix(block: Block) -> tuple[int, ...]:
            parts = [block.tokens]
            while block.parent is not None:
                block = known[block.parent]
                parts.append(block.tokens)
            return tuple(token for part in reversed(parts) for token in part)

        return {medium: set(map(prefix, blocks.values())) for medium, blocks in self.media.items() if blocks}

    def longest(self, tokens: list[int], size: int, adapter: str = "", salt: str = "") -> int:
        """The number of stored blocks of a prompt, in any medium, as a router counts them: by their tokens and what else
        vLLM hashes of a block: the adapter's name, and for the first one the salt."""
        known: dict[tuple[int | None, tuple[int, ...], tuple[str, ...]], int] = {}
        for blocks in self.media.values():
            known.update({(block.parent, block.tokens, block.extra): value for value, block in blocks.items()})
        parent, count = None, 0
        while True:
            extra = tuple(name for name in (adapter, "" if count else salt) if name)
            found = known.get((parent, tuple(tokens[count * size : (count + 1) * size]), extra))
            if found is None:
                return count
            parent, count = found, count + 1


class Router:
    """A subscriber of one publisher. Every wait has a deadline."""

    def __init__(
        self,
        publish: str,
        replay: str = "",
        topic: str = "",
        keys: tuple[bytes, bytes, bytes] | None = None,
        hwm: int = 1000,
    ) -> None:
        """`keys`: the server's public key, and this one's public and secret ones."""
        self._context = zmq.Context()
        self._sub = self._connected(zmq.SUB, publish, keys, hwm)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._dealer = self._connected(zmq.DEALER, replay, keys, hwm) if replay else None
        self.index = Index()
        self.next: dict[str, int] = {}
        self.gaps = 0
        self.jumps = 0
        self.topics: set[str] = set()
        self.ranks: set[int] = set()

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def _connected(
        self, kind: int, endpoint: str, keys: tuple[bytes, bytes, bytes] | None, hwm: int
    ) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, hwm)
        made.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        if keys is not None:
            made.curve_serverkey, made.curve_publickey, made.curve_secretkey = keys
        made.connect(endpoint)
        return made

    def begin_anew(self) -> None:
        """Forget everything, as a router that has just started."""
        self.index = Index(is_strict=self.index.is_strict)
        self.next.clear()
        self.gaps = 0

    def receive(self, timeout_s: float) -> bool:
        """Take one message. False where none came in time."""
        if not self._sub.poll(int(timeout_s * 1000)):
            return False
        frames = self._sub.recv_multipart()
        topic, number, payload = frames[0].decode(), struct.unpack(">Q", frames[1])[0], frames[2]
        is_behind = number > self.next.get(topic, 0)
        if is_behind and self._dealer is not None:
            self.catch_up(topic)
        self._take(topic, number, payload)
        return True

    def receive_until(self, condition: Any, what: str) -> None:
        """Take messages until the condition holds."""
        deadline = time.monotonic() + 180.0
        while not condition():
            self.receive(0.05)
            assert time.monotonic() < deadline, f"not within 180 s: {what}"

    def catch_up(self, topic: str, timeout_s: float = 180.0, only: bool = False) -> int:
        """Ask for everything from the next number on; how many messages came."""
        first, taken = self.next.get(topic, 0), 0
        for name, number, payload in self.replay(first, topic if only else None, timeout_s):
            if number >= self.next.get(name, 0):
                self._take(name, number, payload)
                taken += 1
        return taken

    def replay(self, first: int, topic: str | None = None, timeout_s: float = 180.0) -> list[tuple[str, int, bytes]]:
        """The retained messages from a number on."""
        assert self._dealer is not None
        request = [b"", struct.pack(">Q", first)]
        self._dealer.send_multipart(request if topic is None else [*request, topic.encode()])
        messages: list[tuple[str, int, bytes]] = []
        while True:
            assert self._dealer.poll(int(timeout_s * 1000)), "the replay did not end in time"
            empty, name, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert (name, payload) == (b"", b"")
                return messages
            messages.append((name.decode(), struct.unpack(">Q", number)[0], payload))

    def send_raw(self, frames: list[bytes]) -> None:
        """Send any bytes to the replay socket; nothing if it refuses the connection."""
        assert self._dealer is not None
        with contextlib.suppress(zmq.Again):
            self._dealer.send_multipart(frames)

    def is_answered(self, timeout_s: float) -> bool:
        """True if the replay socket has received anything."""
        assert self._dealer is not None
        return bool(self._dealer.poll(int(timeout_s * 1000)))

    def _take(self, topic: str, number: int, payload: bytes) -> None:
        expected = self.next.get(topic, number)
        if number < expected:
            return  # it came by a replay already
        self.topics.add(topic)
        self.next[topic] = number + 1
        ts, events, rank = decode(payload)
        is_anew = bool(events) and events[0]["type"] == "AllBlocksCleared"
        self.jumps += number != expected
        self.gaps += number != expected and not is_anew
        assert abs(ts - time.time()) < 3600
        self.ranks.add(rank)
        for event in events:
            self.index.apply(event)
