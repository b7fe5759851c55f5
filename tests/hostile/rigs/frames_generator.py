"""Hostile frames, generated from the structure of valid ones. A seed replays them.

Starts from recorded frames and from every declared record, and bends them: bytes, fields, types, counts, lengths,
order, nesting. It sends nothing itself.
"""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kvpool.protocol.frames import FRAME_BYTES_MAX, LENGTH
from kvpool.protocol.records import codec
from kvpool.protocol.records import messages as m
from kvpool.server.service import VERBS
from tests.golden.wire import records
from tests.hostile.rigs.raw_clients import key_of

RECORDS = tuple(records())
REQUESTS = tuple(verb.record for verb in VERBS)
BOUNDARIES: tuple[int, ...] = (
    *(0, 1, 2, 3, 31, 127, 128, 255, 256, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -32, -33, -128, -(1 << 31), -(1 << 63)),
)
KEYS = tuple(key_of(number) for number in range(24))
LENGTHS = (0, 1, 3, 4, 7, 8, 12, 24, 31, 32, 33, 64, 96, 4095, 4096, 4097)
# Heads of msgpack values that announce more than any frame has.
HEADS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xc8\xff\xff\x05",
    b"\xd6\xff\0\0\0\0",
    b"\xd8\x05" + bytes(16),
    b"\xc1",
)


class FramesGenerator:
    """An endless source of frames. `recorded` are whole frames of a real session."""

    def __init__(self, seed: int, recorded: Sequence[bytes] = ()) -> None:
        self.chance = random.Random(seed)
        self._recorded = tuple(recorded)
        self._shapes: list[tuple[Callable[[], bytes], int]] = [
            (self._good, 30),
            (self._wrong_type, 12),
            (self._wrong_count, 6),
            (self._unknown_kind, 5),
            (self._noise, 6),
            (self._nested, 2),
            (self._announcing, 5),
            (self._many_items, 1),
            (self._mutated, 33 if recorded else 0),
        ]
        self._choices = [shape for shape, weight in self._shapes for _ in range(weight)]
        self._requests, self._records = REQUESTS, RECORDS

    def leave_out(self, *records: type[Any]) -> None:
        """Send no good requests of these kinds any more, recorded ones included."""
        kinds = {record.KIND for record in records}
        self._requests = tuple(record for record in REQUESTS if record not in records)
        self._records = tuple(record for record in RECORDS if record not in records)
        self._recorded = tuple(frame for frame in self._recorded if frame[LENGTH.size + 1] not in kinds)

    def body(self) -> bytes:
        """One frame's body: msgpack, or nearly."""
        return self.chance.choice(self._choices)()

    def frame(self) -> bytes:
        """A frame whose length may lie."""
        body, dice = self.body(), self.chance.random()
        length = len(body)
        if dice < 0.02:
            length = self.chance.choice(
                (0, 1, FRAME_BYTES_MAX + 1, 1 << 31, (1 << 32) - 1, self.chance.randrange(1 << 32))
            )
        elif dice < 0.04:
            length = max(0, length + self.chance.choice((-2, -1, 1, 2, 100)))
        frame = LENGTH.pack(length) + body
        return frame[: self.chance.randrange(len(frame) + 1)] if 0.04 <= dice < 0.06 else frame

    def good_request(self) -> bytes:
        """A whole frame of a request with the right types and random content."""
        body = self._packed(self.chance.choice(self._requests))
        return LENGTH.pack(len(body)) + body

    def _good(self) -> bytes:
        return self._packed(self.chance.choice(self._requests if self.chance.random() < 0.8 else self._records))

    def _packed(self, record: type[Any]) -> bytes:
        return _pack([record.KIND, self._sequence(), *self._fields(record)])

    def _fields(self, record: type[Any]) -> list[object]:
        return [self._value(kind) for kind in codec.field_types(record)] if record is not m.Hello else self._hello()

    def _hello(self) -> list[object]:
        numbers = [3, 2, 16, "float16", 32, 2, 0, 1, "", 0]
        if self.chance.random() < 0.5:
            numbers[self.chance.randrange(10)] = self._any()
        magic = m.MAGIC if self.chance.random() < 0.9 else self.chance.randbytes(4)
        hello = [magic, m.PROTOCOL_VERSION, self.chance.choice(("engine", "admin", "root")), "test-model", numbers]
        return (
            hello
            if self.chance.random() < 0.3
            else [*hello, self.chance.choice((1, 1, m.PROTOCOL_VERSION, self._any()))]
        )

    def _wrong_type(self) -> bytes:
        record = self.chance.choice(self._requests)
        fields = self._fields(record)
        if fields:
            fields[self.chance.randrange(len(fields))] = self._any()
        return _pack([record.KIND, self._sequence(), *fields])

    def _wrong_count(self) -> bytes:
        record = self.chance.choice(self._requests)
        fields = self._fields(record)
        fields = fields[:-1] if fields and self.chance.random() < 0.5 else [*fields, self._any()]
        return _pack([record.KIND, self._sequence(), *fields])

    def _unknown_kind(self) -> bytes:
        kind = self._any() if self.chance.random() < 0.4 else self.chance.randrange(-40, 300)
        sequence = self._any() if self.chance.random() < 0.3 else self._sequence()
        return _pack([kind, sequence, *(self._any() for _ in range(self.chance.randrange(4)))])

    def _noise(self) -> bytes:
        return self.chance.randbytes(self.chance.randrange(2, 80))

    def _nested(self) -> bytes:
        depth = self.chance.choice((2, 16, 100, 500, 511, 512, 513, 1000, 4000))
        opening = self.chance.choice((b"\x91", b"\x81\xa1k", b"\x92\xc0"))
        return b"\x93" + struct.pack("BB", self.chance.choice(self._requests).KIND, 1) + opening * depth + b"\xc0"

    def _announcing(self) -> bytes:
        head = self.chance.choice(HEADS)
        return b"\x93" + struct.pack("BB", self.chance.choice(self._requests).KIND, 1) + head + self.chance.randbytes(8)

    def _many_items(self) -> bytes:
        item = self.chance.choice((b"\x80", b"\x90", b"\xc0", b"\xcd\x7f\xff", b"\xa0"))
        count = self.chance.choice((15, 1000, 4095))
        return b"\x93\x0a\x01\xdc" + struct.pack(">H", 40) + (b"\xdc" + struct.pack(">H", count) + item * count) * 40

    def _mutated(self) -> bytes:
        """A recorded body with bytes flipped, cut out, doubled or put in, or spliced with another."""
        body = bytearray(self.chance.choice(self._recorded)[LENGTH.size :])
        for _ in range(self.chance.choice((1, 1, 2, 5))):
            at = self.chance.randrange(len(body)) if body else 0
            verb = self.chance.randrange(6)
            if verb <= 1 and body:
                body[at] = self.chance.randrange(256) if verb else body[at] ^ 1 << self.chance.randrange(8)
            elif verb == 2:
                del body[at : at + self.chance.randrange(1, 9)]
            elif verb == 3:
                body[at:at] = self.chance.randbytes(self.chance.randrange(1, 9))
            elif verb == 4:
                body[at:at] = body[at : at + self.chance.randrange(1, 40)]
            else:
                other = self.chance.choice(self._recorded)
                body[at:] = other[min(len(other), at + LENGTH.size) :]
        return bytes(body)

    def _sequence(self) -> int:
        return self.chance.randrange(1 << 20) if self.chance.random() < 0.97 else self.chance.choice(BOUNDARIES)

    def _value(self, kind: type[Any]) -> object:
        if kind is int:
            return self.chance.randrange(1, 40) if self.chance.random() < 0.7 else self.chance.choice(BOUNDARIES)
        if kind is bytes:
            return self._column()
        if kind is float:
            return self.chance.choice((0.0, -1.0, 1e300, 1e-300, float("inf"), float("-inf"), float("nan")))
        if kind is bool:
            return self.chance.random() < 0.2
        if kind is str:
            return self.chance.choice(("", "test-model", "x" * 600, "\0", "ü" * 40))
        return [] if kind is list else {}

    def _column(self) -> bytes:
        dice = self.chance.random()
        if dice < 0.55:
            return b"".join(self.chance.choices(KEYS, k=self.chance.choice((1, 1, 2, 3, 8))))
        if dice < 0.75:
            return bytes(self.chance.choice(LENGTHS))
        return struct.pack("<q", self.chance.randrange(40)) * self.chance.randrange(4)

    def _any(self) -> object:
        dice = self.chance.randrange(8)
        if dice < 5:
            return self._value((int, bytes, float, bool, str)[dice])
        return (None, [1, [2, []]], {"k": {"n": 1}})[dice - 5]


def _pack(items: list[object]) -> bytes:
    body: bytes = msgpack.packb(items, use_bin_type=True)
    return body
