"""The longest run of chunks that one node has, of those that a table of other nodes' chunks knows."""

from typing import Any

from kvpool.index.remote_chunks import NodeName, RemoteChunks, RemoteRun
from kvpool.key_column import KeyColumn

NO_RUN = RemoteRun(NodeName(""), 0)


def longest_run(remote: RemoteChunks, keys: KeyColumn, first: int, *avoid: Any, **engines: Any) -> RemoteRun:
    """See `RemoteChunks.runs`; NO_RUN where no node has the first one."""
    return next(iter(remote.runs(keys, first, *avoid, **engines)), NO_RUN)
