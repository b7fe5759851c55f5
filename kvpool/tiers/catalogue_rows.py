"""The catalogue's rows: their bytes, and reading many of them at once.

    row := key:32 parent:32 offset:u64 generation:u64 recency:u64 layer_bytes:u64 layers:u32 namespace:u32
           priority:u32 duration_s:u32 crc:u32 pad:u32

Little endian. LMDB's key is the row's key and its value is the rest. `crc` is the CRC-32C of everything before it: LMDB
notices no damage of its own. `recency` is a number that rises, not a time. Pure functions; any thread.
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.types import KEY_BYTES

_CHECKED = struct.Struct("<32s32sQQQQIIII")
_CRC = struct.Struct("<II")
ROW_BYTES = _CHECKED.size + _CRC.size
VALUE_BYTES = ROW_BYTES - KEY_BYTES
_RECENCY_AT = 80
ROW = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),
        ("offset", "<u8"),
        ("generation", "<u8"),
        ("recency", "<u8"),
        ("layer_bytes", "<u8"),
        ("layers", "<u4"),
        ("namespace", "<u4"),
        ("priority", "<u4"),
        ("duration_s", "<u4"),
        ("crc", "<u4"),
        ("pad", "<u4"),
    ]
)
assert ROW.itemsize == ROW_BYTES == kvpool_native.CATALOGUE_ROW_BYTES
# What a chunk is kept with when nothing was said; the default of TensorRT-LLM's KvCacheRetentionConfig.
DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class Row:
    """Where one chunk lies, and what it is. `duration_s` 0: its priority (0 to 100) does not end."""

    key: bytes
    parent: bytes
    offset: int
    generation: int
    recency: int
    layer_bytes: int
    layers: int
    namespace: int
    priority: int = DEFAULT_PRIORITY
    duration_s: int = 0

    def encode(self) -> tuple[bytes, bytes]:
        """LMDB's key and value."""
        checked = _CHECKED.pack(
            self.key,
            self.parent.ljust(KEY_BYTES, b"\0"),
            self.offset,
            self.generation,
            self.recency,
            self.layer_bytes,
            self.layers,
            self.namespace,
            self.priority,
            self.duration_s,
        )
        return self.key, _closed(checked)[KEY_BYTES:]


def with_recency(key: bytes, value: bytes, recency: int) -> bytes | None:
    """LMDB's value with another recency; None where the row is not a good one."""
    checked = bytearray(key + value[: _CHECKED.size - KEY_BYTES])
    if len(value) != VALUE_BYTES or _closed(bytes(checked))[KEY_BYTES:] != value:
        return None
    checked[_RECENCY_AT : _RECENCY_AT + 8] = recency.to_bytes(8, "little")
    return _closed(bytes(checked))[KEY_BYTES:]


def join(keys: bytes, values: bytes) -> bytes:
    """Whole rows of LMDB's packed keys and values. Raises ValueError where one has another length."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or len(values) != count * VALUE_BYTES:
        raise ValueError(f"{len(keys)} bytes of keys and {len(values)} of values, expected 32 and {VALUE_BYTES} a row")
    joined = np.empty((count, ROW_BYTES), np.uint8)
    joined[:, :KEY_BYTES] = np.frombuffer(keys, np.uint8).reshape(count, KEY_BYTES)
    joined[:, KEY_BYTES:] = np.frombuffer(values, np.uint8).reshape(count, VALUE_BYTES)
    return joined.tobytes()


def restorable(rows: bytes) -> tuple["npt.NDArray[np.void]", int]:
    """The good ones of packed rows, ancestors and recent ones first, and how many were bad.

    A chunk counts as used when a descendant was, whatever order their rows were written in.
    """
    order = np.frombuffer(kvpool_native.restoring_order(rows), np.uint32)
    table = np.frombuffer(rows, ROW)
    return table[order], len(table) - len(order)


def _closed(checked: bytes) -> bytes:
    return checked + _CRC.pack(kvpool_native.crc32c(checked), 0)
