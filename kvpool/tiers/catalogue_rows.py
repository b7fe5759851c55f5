"""The catalogue's rows: their bytes, and reading many of them at once.

    row := key:32 parent:32 offset:u64 generation:u64 recency:u64 layer_bytes:u64 layers:u32 namespace:u32 crc:u32 pad:u32

Little endian. LMDB's key is the row's key and its value is the rest. `crc` is the CRC-32C of everything before it: LMDB
notices no damage of its own. `recency` is a number that rises, not a time. Pure functions; any thread.
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.types import KEY_BYTES

_CHECKED = struct.Struct("<32s32sQQQQII")
_CRC = struct.Struct("<II")
ROW_BYTES = _CHECKED.size + _CRC.size
CHECKED_BYTES = _CHECKED.size
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
        ("crc", "<u4"),
        ("pad", "<u4"),
    ]
)
assert ROW.itemsize == ROW_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """Where one chunk lies, and what it is."""

    key: bytes
    parent: bytes
    offset: int
    generation: int
    recency: int
    layer_bytes: int
    layers: int
    namespace: int

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
        )
        whole = checked + _CRC.pack(kvpool_native.crc32c(checked), 0)
        return self.key, whole[KEY_BYTES:]


def parse(keys: bytes, values: bytes) -> tuple["npt.NDArray[np.void]", int]:
    """The good rows of packed keys and values, and how many were bad."""
    count = len(keys) // KEY_BYTES
    value_bytes = ROW_BYTES - KEY_BYTES
    if len(values) != count * value_bytes or len(keys) != count * KEY_BYTES:
        return np.empty(0, ROW), count
    joined = np.empty((count, ROW_BYTES), np.uint8)
    joined[:, :KEY_BYTES] = np.frombuffer(keys, np.uint8).reshape(count, KEY_BYTES)
    joined[:, KEY_BYTES:] = np.frombuffer(values, np.uint8).reshape(count, value_bytes)
    crcs = kvpool_native.crc32c_rows(np.ascontiguousarray(joined[:, :CHECKED_BYTES]).tobytes(), CHECKED_BYTES)
    rows = joined.reshape(-1).view(ROW)
    is_good = rows["crc"] == np.frombuffer(crcs, "<u4")
    return rows[is_good], int(count - is_good.sum())


def in_restoring_order(rows: "npt.NDArray[np.void]") -> "npt.NDArray[np.void]":
    """Ancestors before descendants, the most recent first. Rows whose ancestors are lacking stand where they may.

    A chunk counts as used when a descendant was, whatever order their rows were written in.
    """
    if not len(rows):
        return rows
    keys = np.ascontiguousarray(rows["key"])
    order = np.argsort(keys)
    places = np.searchsorted(keys, rows["parent"], sorter=order)
    places[places == len(rows)] = 0
    parents = order[places]
    has_parent = keys[parents] == rows["parent"]
    parents[~has_parent] = -1
    depth, recency = _depths(parents, rows["recency"].astype(np.uint64))
    return rows[np.lexsort((depth, np.iinfo(np.uint64).max - recency))]


def _depths(
    parents: "npt.NDArray[np.int64]", recency: "npt.NDArray[np.uint64]"
) -> tuple["npt.NDArray[np.int64]", "npt.NDArray[np.uint64]"]:
    """How far below its root each row stands, and its recency raised to that of its most recent descendant."""
    depth = np.zeros(len(parents), np.int64)
    levels = []
    current = np.flatnonzero(parents >= 0)
    above = parents[current]
    steps = 0
    while len(current) and steps < len(parents):
        depth[current] += 1
        levels.append((current, above))
        keep = parents[above] >= 0
        current, above = current[keep], parents[above[keep]]
        steps += 1
    for below, ancestors in levels:
        np.maximum.at(recency, ancestors, recency[below])
    return depth, recency
