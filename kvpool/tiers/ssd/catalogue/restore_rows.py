"""Rows that restore an earlier process's chunks in a tier's directory. Pure functions; any thread."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpool.index.namespaces import Namespace
from kvpool.packed_rows import RESTORE_ROW
from kvpool.types import SizeClassId

_NONE = (1 << 32) - 1
_MS_PER_S = 1000


def pack_restore_rows(
    rows: "npt.NDArray[np.void]",
    namespaces: dict[int, Namespace],
    size_class_of: Callable[[Namespace], SizeClassId | None],
) -> "npt.NDArray[np.void]":
    """The catalogue's rows in the form and order that `Directory.restore` takes.

    `namespaces`: by the catalogue's numbers. A row whose namespace is unknown, or whose geometry is not its namespace's, is
    packed so that `restore` refuses it.
    """
    packed = np.zeros(len(rows), RESTORE_ROW)
    for name in ("key", "parent", "offset", "generation", "priority"):
        packed[name] = rows[name]
    packed["duration_ms"] = np.minimum(rows["duration_s"].astype(np.uint64) * _MS_PER_S, _NONE)
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
