"""Flush of a native directory in one piece."""

import kvpool_native


def flush_whole(
    directory: kvpool_native.Directory, before_ns: int, namespaces: list[int] | None = None
) -> tuple[int, int, int]:
    """Flush every chunk that was not used since and is not held: (chunks, bytes, skipped because held)."""
    walk = kvpool_native.FlushWalk(directory, namespaces, before_ns)
    while walk.advance(1 << 20):
        pass
    found = walk.result()
    return found.chunks, found.bytes, found.skipped
