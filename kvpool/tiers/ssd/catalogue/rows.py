"""The catalogue's rows: their bytes, reading many of them at once, and restoring their chunks in a tier's directory.

    row := key:32 parent:32 offset:u64 generation:u64 recency:u64 extent_bytes:u64 extents:u32 namespace:u32
           priority:u32 duration_s:u32 crc:u32 pad:u32

Little endian. LMDB's key is the row's key and its value is the whole row, so that one pass reads everything. `crc` is the
CRC-32C of all fields before it: LMDB itself does not detect damage. `recency` is a rising number, not a time. Pure functions;
any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.ids import KEY_BYTES, SizeClassId
from kvpool.index.namespaces import Namespace
from kvpool.packed_rows import CATALOGUE_ROW, RESTORE_ROW
from kvpool.row_structs import struct_of
from kvpool.states import DEFAULT_PRIORITY

_CHECKED, _ = struct_of(kvpool_native.CATALOGUE_ROW, "key", "duration_s")
_KEY, _ = struct_of(kvpool_native.CATALOGUE_ROW, "key", "key")
KEY = slice(0, _KEY.size)  # of a row
_CRC, _ = struct_of(kvpool_native.CATALOGUE_ROW, "crc", "pad")
_RECENCY, _RECENCY_AT = struct_of(kvpool_native.CATALOGUE_ROW, "recency", "recency")
_GENERATION, _GENERATION_AT = struct_of(kvpool_native.CATALOGUE_ROW, "generation", "generation")
_KEPT, _KEPT_AT = struct_of(kvpool_native.CATALOGUE_ROW, "priority", "duration_s")
ROW_BYTES = CATALOGUE_ROW.itemsize
_NONE = (1 << 32) - 1
MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """Row of one chunk: its slot, namespace and retention. `duration_s` 0: the priority does not expire."""

    key: bytes
    parent: bytes
    offset: int
    generation: int
    recency: int
    extent_bytes: int
    extents: int
    namespace: int
    priority: int = DEFAULT_PRIORITY
    duration_s: int = 0

    def encode(self) -> bytes:
        """The row's bytes."""
        checked = _CHECKED.pack(
            self.key,
            self.parent.ljust(KEY_BYTES, b"\0"),
            self.offset,
            self.generation,
            self.recency,
            self.extent_bytes,
            self.extents,
            self.namespace,
            self.priority,
            self.duration_s,
        )
        return _closed(checked)


@dataclass(frozen=True, slots=True)
class Touch:
    """The fields of a row that may change: last use and retention."""

    recency: int
    priority: int
    duration_s: int


def with_touch(row: bytes, touch: Touch) -> bytes | None:
    """An encoded row with changed fields; None where it is damaged."""
    checked = bytearray(row[: _CHECKED.size])
    if len(row) != ROW_BYTES or _closed(bytes(checked)) != row:
        return None
    _RECENCY.pack_into(checked, _RECENCY_AT, touch.recency)
    _KEPT.pack_into(checked, _KEPT_AT, touch.priority, touch.duration_s)
    return _closed(bytes(checked))


def generation_of(row: bytes) -> int:
    """The generation in an encoded row."""
    generation: int = _GENERATION.unpack_from(row, _GENERATION_AT)[0]
    return generation


def restorable(rows: bytes) -> tuple[npt.NDArray[np.void], int]:
    """The undamaged rows, ancestors and recently used ones first, and the number of damaged ones.

    A chunk counts as used when a descendant was used, in whatever order their rows were written.
    """
    order = np.frombuffer(kvpool_native.restoring_order(rows), np.uint32)
    table = np.frombuffer(rows, CATALOGUE_ROW)
    return table[order], len(table) - len(order)


def pack_restore_rows(
    rows: npt.NDArray[np.void],
    namespaces: dict[int, Namespace],
    size_class_of: Callable[[Namespace], SizeClassId | None],
) -> npt.NDArray[np.void]:
    """The catalogue's rows in the form and order that `Directory.restore` takes.

    `namespaces`: by the catalogue's numbers. A row whose namespace is unknown, or whose geometry is not its namespace's, is
    packed so that `restore` refuses it.
    """
    packed = np.zeros(len(rows), RESTORE_ROW)
    for name in ("key", "parent", "offset", "generation", "priority"):
        packed[name] = rows[name]
    packed["duration_ms"] = np.minimum(rows["duration_s"].astype(np.uint64) * MS_PER_S, _NONE)
    packed["namespace"] = packed["size_class"] = _NONE
    for number, namespace in namespaces.items():
        size_class = size_class_of(namespace)
        layout = namespace.layout
        fits = (rows["extents"] == layout.extents) & (rows["extent_bytes"] == layout.extent_bytes)
        chosen = (rows["namespace"] == number) & fits
        if size_class is not None:
            packed["namespace"][chosen] = namespace.id
            packed["size_class"][chosen] = size_class
    return packed


def _closed(checked: bytes) -> bytes:
    return checked + _CRC.pack(kvpool_native.crc32c(checked), 0)
