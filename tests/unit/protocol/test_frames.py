"""Frames: invalid ones are refused as ProtocolError before they cost anything, however they are cut."""

import enum
import random
from collections.abc import Sequence
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.protocol.frames import (
    FRAME_BYTES_MAX,
    LENGTH,
    FrameReader,
    check_length,
    decode,
)


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def encode(kind: int, sequence: int, fields: Sequence[object]) -> bytes:
    """The frame of these fields, whatever record has them."""
    named = {f"field{number}": field for number, field in enumerate(fields)}
    return kvpool_native.encode_record(kind, sequence, SimpleNamespace(**named), tuple(named))


def _nested(depth: int) -> bytes:
    return b"\x93\x01\x02" + b"\x91" * depth + b"\xc0"


def test_a_frame_over_the_limit_raises_in_its_sender() -> None:
    with pytest.raises(AssertionError):
        encode(1, 1, [bytes(FRAME_BYTES_MAX)])


@pytest.mark.parametrize(
    "fields",
    [
        [],
        (7, b"short", "text"),
        [
            sign * (2**bits + step)
            for bits in (4, 5, 7, 8, 15, 16, 31, 32, 62)
            for step in (-1, 0, 1)
            for sign in (1, -1)
        ],
        [2**64 - 1, 2**63, 2**63 - 1, -(2**63), 0, -1, True, False, None],
        [0.5, -0.0, 1e300, float("inf")],
        ["t" * size for size in (0, 31, 32, 255, 256, 65535, 65536)] + ["ü€"],
        [bytes(size) for size in (0, 255, 256, 16383, 16384, 65535, 65536)],
        [bytearray(3), memoryview(b"view"), bytearray(20_000)],
        [1, bytes(65535), "text", [1, (2, [])], {"key": b"value", "list": [{}]}],
        [list(range(size)) for size in (15, 16, 65536)],
        [{str(key): key for key in range(size)} for size in (15, 16)],
    ],
    ids=lambda fields: f"{fields!s:.40}",
)
def test_a_frame_is_what_msgpack_writes_of_its_fields(fields: list[object]) -> None:
    body = msgpack.packb([300, 1 << 40, *fields], use_bin_type=True)
    assert encode(300, 1 << 40, fields) == _framed(body)


class _Code(enum.IntEnum):
    FIFTH = 5


def test_numbers_and_truths_of_any_class_are_written_as_such() -> None:
    assert encode(_Code.FIFTH, 0, [_Code.FIFTH, np.float64(0.5)]) == _framed(msgpack.packb([5, 0, 5, 0.5]))


def _lists(depth: int) -> list[object]:
    return [_lists(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("field", "error"),
    [
        (1 << 64, OverflowError),
        (-(1 << 63) - 1, OverflowError),
        ("\ud800", UnicodeEncodeError),
        ({1, 2}, TypeError),
        (np.int64(1), TypeError),
        (_lists(100), ValueError),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_no_frame_has_raises_in_its_sender(field: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        encode(1, 1, [field])


@pytest.mark.parametrize("length", [0, 1, FRAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_a_length_out_of_range_is_refused_before_its_body_arrives(length: int) -> None:
    with pytest.raises(ProtocolError):
        check_length(length)
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(LENGTH.pack(length)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x92\x01\x02\x03",
        msgpack.packb({"kind": 1}),
        msgpack.packb("kind"),
        msgpack.packb(12),
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb([1]),
        msgpack.packb(["1", 2]),
        msgpack.packb([1, "2"]),
        msgpack.packb([True, 2]),
        msgpack.packb([1, False]),
        msgpack.packb([1, 2.0]),
        msgpack.packb([1, -1]),
        msgpack.packb([1, 1 << 63]),
        msgpack.packb([1, 2, {1: 2}]),
        msgpack.packb([1, 2, {b"\xff": [], None: 1}]),
        msgpack.packb([1, 2, msgpack.ExtType(5, b"")]),
        msgpack.packb([1, 2, msgpack.ExtType(5, b"code")]),
        msgpack.packb([1, 2, msgpack.Timestamp(1, 2)]),
        msgpack.packb([1, 2, [0] * 4097]),
        b"\x93\x01\x02\xa2\xff\xfe",
        b"\x93\x01\x02\xdd\xff\xff\xff\xff",
        b"\x93\x01\x02\xc6\xff\xff\xff\xff",
        b"\x93\x01\x02\xdf\xff\xff\xff\xff",
        _nested(4096),
        _nested(200_000),
    ],
    ids=lambda body: body[:8].hex() or "empty",
)
def test_a_body_that_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


def test_frames_arrive_in_pieces_of_any_size(seed: int) -> None:
    chance = random.Random(seed)
    sent = [(kind, kind * 3, [chance.randbytes(chance.randrange(300)), kind]) for kind in range(60)]
    stream = b"".join(encode(*frame) for frame in sent)
    reader, received = FrameReader(), []
    while stream:
        size = chance.choice((1, 2, 3, 5, 100, 1000))
        received += list(reader.feed(stream[:size]))
        stream = stream[size:]
    assert received == sent


def test_good_frames_before_a_bad_one_are_handed_out_first() -> None:
    frames = FrameReader().feed(encode(1, 2, []) + _framed(b"\xc0\xc0"))
    assert next(frames) == (1, 2, [])
    with pytest.raises(ProtocolError):
        next(frames)


def test_random_bytes_raise_nothing_but_a_protocol_error(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20_000):
        body = chance.randbytes(chance.randrange(40))
        if chance.random() < 0.7:
            body = bytes([0x90 + chance.randrange(16), 1, 2]) + body
        try:
            kind, sequence, fields = decode(body)
        except ProtocolError:
            continue
        assert type(kind) is int
        assert type(sequence) is int
        assert isinstance(fields, list)


def test_a_frame_with_one_byte_changed_raises_nothing_but_a_protocol_error(seed: int) -> None:
    chance = random.Random(seed)
    good = encode(3, 9, [b"k" * 64, "model", [1, 2, 3], {"name": 1.5}, None])
    for _ in range(5_000):
        frame = bytearray(good)
        frame[chance.randrange(len(frame))] = chance.randrange(256)
        try:
            list(FrameReader().feed(bytes(frame)))
        except ProtocolError:
            continue


def test_a_frame_of_too_many_items_is_refused_however_they_are_nested() -> None:
    for item in (b"\x80", b"\x90", b"\xc0", b"\xa0"):
        array = b"\xdc\x0f\xff" + item * 4095
        body = b"\x93\x0a\x01\xdc\x00\xc8" + array * 200
        with pytest.raises(ProtocolError, match="items"):
            decode(body)


def test_as_many_items_as_allowed_pass() -> None:
    fields: list[object] = [["x" * 8] * 2000, {"problems": ["y"] * 1900}]
    assert decode(encode(34, 1, fields)[LENGTH.size :]) == (34, 1, fields)


def test_frames_wait_as_bytes_until_they_are_taken() -> None:
    reader = FrameReader()
    reader.add_bytes(encode(1, 1, []) + encode(1, 2, []) + encode(1, 3, [])[:5])
    assert reader.next() == (1, 1, [])
    reader.add_bytes(encode(1, 3, [])[5:] + b"\x02")
    assert reader.next() == (1, 2, [])
    assert reader.next() == (1, 3, [])
    assert reader.next() is None
    reader.add_bytes(b"\0\0\0\xc0\xc0")
    with pytest.raises(ProtocolError):
        reader.next()
