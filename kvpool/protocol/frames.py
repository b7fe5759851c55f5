"""Frames: a 4-byte little-endian length and that many bytes of msgpack.

    frame   := length:u32 body
    body    := msgpack array [kind, sequence, field, …]      kind names the record, see `records`

The length is checked before a byte of the body is decoded; extension types, maps with keys other than strings and
arrays or maps over the limits are refused by the decoder, and so is a frame of more than ITEMS_MAX items in all of its
arrays and maps: a mebibyte of empty maps would take the control thread 50 ms. Columns (keys, offsets, checksums) travel
packed in one bin field each: 512 keys decode in 2 µs so, against 93 µs as 512 objects.

Holds no socket. Owned by the reader of the connection.
"""

import struct
from collections.abc import Iterator

import msgpack

from kvpool.errors import ProtocolError

FRAME_BYTES_MAX = 1 << 20
BODY_BYTES_MIN = 2
LENGTH = struct.Struct("<I")
ITEMS_MAX = 4096
# Below this size, copying a body is faster than making a view of it.
COPIED_BYTES_MAX = 1024
# Bytes of decoded frames that may stay in the buffer, so that small frames are not copied again and again.
TAKEN_BYTES_KEPT = 16 << 10


def decode(body: bytes | bytearray | memoryview) -> tuple[int, int, list[object]]:
    """`(kind, sequence, fields)` of a body. Raises ProtocolError on anything else."""
    limit = _ItemLimit() if len(body) > ITEMS_MAX else None  # an item has a byte at least
    try:
        items = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            use_list=True,
            list_hook=limit.take_list if limit else None,
            object_hook=limit.take_map if limit else None,
            ext_hook=_refuse_extension,
            max_str_len=FRAME_BYTES_MAX,
            max_bin_len=FRAME_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=ITEMS_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"frame of {len(body)} bytes is not msgpack of this protocol: {error}") from error
    if not isinstance(items, list) or len(items) < 2:
        raise ProtocolError("frame is not an array of kind, sequence and fields")
    kind, sequence = items[0], items[1]
    if type(kind) is not int or type(sequence) is not int or not 0 <= sequence < 1 << 63:
        raise ProtocolError("frame does not begin with an integer kind and sequence")
    return kind, sequence, items[2:]


def check_length(length: int) -> None:
    """Raises ProtocolError unless a body of `length` bytes may follow."""
    if not BODY_BYTES_MIN <= length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"frame announces {length} bytes, expected {BODY_BYTES_MIN}..{FRAME_BYTES_MAX}")


class FrameReader:
    """Cuts a byte stream into frames, one at a call: frames that wait cost only their bytes.

    Invariant: `_buffer` from `_start` on begins with a frame, and holds bytes that arrived and were not decoded: where nothing
    was left over, the received bytes themselves, uncopied. Its owner adds at most one read while whole frames wait.
    """

    __slots__ = ("_buffer", "_start", "waiting")

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""
        self._start = 0
        self.waiting = 0  # bytes that arrived and were not decoded

    def feed(self, data: bytes) -> Iterator[tuple[int, int, list[object]]]:
        """Add `data`, and return the complete frames. Raises ProtocolError at the first bad one."""
        self.add_bytes(data)
        while (frame := self.next()) is not None:
            yield frame

    def add_bytes(self, data: bytes) -> None:
        """Bytes arrived."""
        if not self.waiting:
            self._buffer = data
        elif isinstance(self._buffer, bytearray):
            del self._buffer[: self._start]
            self._buffer += data
        else:
            self._buffer = bytearray(memoryview(self._buffer)[self._start :])
            self._buffer += data
        self._start = 0
        self.waiting = len(self._buffer)

    @property
    def is_short(self) -> bool:
        """Whether more bytes have to come before `next` returns or refuses a frame."""
        if self.waiting < LENGTH.size:
            return True
        length: int = LENGTH.unpack_from(self._buffer, self._start)[0]
        return BODY_BYTES_MIN <= length <= FRAME_BYTES_MAX and self.waiting < LENGTH.size + length

    def next(self) -> tuple[int, int, list[object]] | None:
        """The next complete frame, None where more bytes have to come first. Raises ProtocolError for a bad one."""
        buffer, waiting = self._buffer, self.waiting
        if waiting < LENGTH.size:
            return None
        start = self._start + LENGTH.size
        (length,) = LENGTH.unpack_from(buffer, self._start)
        if not BODY_BYTES_MIN <= length <= FRAME_BYTES_MAX:
            check_length(length)
        if waiting < LENGTH.size + length:
            return None
        end = start + length
        self.skip(LENGTH.size + length)
        if length <= COPIED_BYTES_MAX:
            return decode(buffer[start:end])
        with memoryview(buffer) as whole, whole[start:end] as body:
            return decode(body)

    def unread(self) -> tuple[bytes | bytearray, int]:
        """The bytes that were not decoded, and where in them they begin. Nothing is copied: only until the next call."""
        return self._buffer, self._start

    def skip(self, count: int) -> None:
        """So many leading bytes have been decoded. REQUIRES: they are whole frames."""
        end, left = self._start + count, self.waiting - count
        self.waiting = left
        if not left:
            self._buffer, self._start = b"", 0
        elif end > TAKEN_BYTES_KEPT and left < end:
            # Decoded bytes are dropped where they are many, so that a connection costs no more memory than it has to.
            self._buffer, self._start = bytearray(memoryview(self._buffer)[end:]), 0
        else:
            self._start = end


class _ItemLimit:
    """Counts the items of one frame's arrays and maps while they are decoded, to stop at ITEMS_MAX."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = ITEMS_MAX

    def take_list(self, items: list[object]) -> list[object]:
        """Count a complete array."""
        self._take(len(items))
        return items

    def take_map(self, items: dict[str, object]) -> dict[str, object]:
        """Count a complete map."""
        self._take(len(items))
        return items

    def _take(self, count: int) -> None:
        self._left -= 1 + count
        if self._left < 0:
            raise ProtocolError(f"frame has more than {ITEMS_MAX} items")


def _refuse_extension(code: int, data: bytes) -> object:
    raise ProtocolError(f"frame carries extension type {code} of {len(data)} bytes, expected none")
