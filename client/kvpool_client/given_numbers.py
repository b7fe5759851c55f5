"""Numbers that a caller gives: of Python or of numpy, and never a bool. Pure; any thread."""

import numpy as np

TOKENS_MAX = (1 << 62) - 1  # more than any prompt has


def is_index(value: object, most: int) -> bool:
    """Whether this is an integer from 0 to `most`."""
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and bool(0 <= value <= most)


def is_number(value: object) -> bool:
    """Whether this is an integer or a float."""
    return not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating))
