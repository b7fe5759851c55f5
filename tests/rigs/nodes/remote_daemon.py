"""A daemon whose pool has a table of other nodes' chunks, which the test writes: as if the daemon followed their events.

`python -m tests.rigs.nodes.remote_daemon PATH BYTES OPTION…` serves with the table in that file, a descriptor of the test.
"""

import os
import sys
from pathlib import Path
from typing import Any

import kvpool_native
from kvpool.cli import kvpoold
from kvpool.index.remote_chunks import NodeName, RemoteChunks
from kvpool.key_column import KeyColumn
from kvpool.pool.pool import Pool
from tests.rigs.daemon import Daemon

NODE = NodeName("other")


class RemoteDaemon(Daemon):
    """`remote`: what it knows of other nodes, written by the test."""

    def __init__(self, directory: Path, **options: str) -> None:
        super().__init__(directory, **options)
        self.remote = RemoteChunks(1000, bytes(16))
        self.remote.join(NODE)

    def __enter__(self) -> "RemoteDaemon":
        super().__enter__()
        return self

    def command(self) -> list[str]:
        """The command line."""
        program, _, _, *options = super().command()
        table = self.remote.mapping
        path = f"/proc/{os.getpid()}/fd/{table.fd}"
        return [program, "-m", "tests.rigs.nodes.remote_daemon", path, str(table.size), *options]

    def announce(self, keys: KeyColumn) -> None:
        """Another node has these chunks, or had them."""
        assert self.remote.note_stored(NODE, keys)
        while self.remote.advance():
            pass


def serve(path: str, size: int, options: list[str]) -> int:
    """As `kvpoold` does, with a pool that has the table from its beginning."""
    fd = os.open(path, os.O_RDONLY)
    table = kvpool_native.Mapping.attach(fd, size, writable=False)
    os.close(fd)

    begin = Pool.__init__

    def begin_with_table(pool: Pool, *arguments: Any) -> None:
        begin(pool, *arguments)
        pool.remote_table = table

    Pool.__init__ = begin_with_table  # type: ignore[assignment, method-assign]
    return kvpoold.run(options)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
