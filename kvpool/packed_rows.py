"""Rows that cross to native code packed: their numpy types, as the native module declares them (see `row_structs.py`).

For those who have arrays of rows: a daemon without an SSD tier and a device has none. Little endian. Pure; any thread.
"""

import numpy as np

import kvpool_native


def _row_type(layout: kvpool_native.RowLayout) -> "np.dtype[np.void]":
    """The numpy type of a row."""
    return np.dtype(
        {
            "names": layout.names,
            "formats": layout.formats,
            "offsets": layout.offsets,
            "itemsize": layout.bytes,
        }
    )


MOVE_ROW = _row_type(kvpool_native.MOVE_ROW)
RESTORE_ROW = _row_type(kvpool_native.RESTORE_ROW)
CATALOGUE_ROW = _row_type(kvpool_native.CATALOGUE_ROW)
CHANGE_ROW = _row_type(kvpool_native.CHANGE_ROW)
DEVICE_MOVE_ROW = _row_type(kvpool_native.DEVICE_MOVE_ROW)
