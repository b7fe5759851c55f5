"""Frames: invalid ones are refused as ProtocolError before they cost anything, however they are cut."""

import random

import msgpack
import pytest

from kvpool.errors import ProtocolError
from kvpool.protocol.frames import (
    FIXED_ARRAY_MAX,
    FRAME_BYTES_MAX,
    LENGTH,
    PIECE_BYTES,
    FrameReader,
    check_length,
    decode,
    encode,
    encode_pieces,
)


def _framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def _nested(depth: int) -> bytes:
    return b"\x93\x01\x02" + b"\x91" * depth + b"\xc0"


def test_a_frame_over_the_limit_raises_in_its_sender() -> None:
    with pytest.raises(AssertionError):
        encode(1, 1, [bytes(FRAME_BYTES_MAX)])

    with pytest.raises(AssertionError):
        encode_pieces(1, 1, [bytes(FRAME_BYTES_MAX)])


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [7, b"short", "text"],
        [bytes(PIECE_BYTES - 1)],
        [bytes(PIECE_BYTES)],
        [1, bytes(65535), "text", [1, 2], {"key": b"value"}],
        [bytes(65536), b"", None, True, 0.5],
        ["first", bytes(70_000), bytes(20_000)],
        [*range(FIXED_ARRAY_MAX - 3), bytes(PIECE_BYTES)],
    ],
)
def test_the_pieces_of_a_frame_are_its_bytes_and_long_columns_are_not_copied(fields: list[object]) -> None:
    pieces = encode_pieces(300, 1 << 40, fields)
    assert b"".join(pieces) == encode(300, 1 << 40, fields)
    long = [field for field in fields if isinstance(field, bytes) and len(field) >= PIECE_BYTES]
    assert [piece for piece in pieces if any(piece is field for field in long)] == long


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
