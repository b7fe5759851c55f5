"""A kvpoold on a shared store in files, whose library follows a script.

python -m tests.rigs.store.store_daemon DIRECTORY OPTIONS …    the daemon, with the store's process in place of the real one
"""

import sys
from functools import partial
from pathlib import Path

from kvpool.cli.kvpoold import main
from kvpool.tiers.store import tier
from tests.rigs.daemon import PROGRAM, Daemon, wait_until
from tests.rigs.store.scripted_store import SharedDirectory


class StoreDaemon(Daemon):
    """A daemon on such a store."""

    def __enter__(self) -> "StoreDaemon":
        self.start()
        return self

    def __init__(self, directory: Path, shared: SharedDirectory, **options: str) -> None:
        directory.mkdir(exist_ok=True)
        given = {"store.master": "localhost:1", "store.buffer": "4MiB", "store.answer_timeout": "5s"}
        super().__init__(directory, **{**given, "store.miss_ttl": "10ms", "store.publish": "off", **options})
        self._shared = shared

    def command(self) -> list[str]:
        """The command line."""
        arguments = super().command()[len(PROGRAM) :]
        return [sys.executable, "-m", "tests.rigs.store.store_daemon", str(self._shared.path), *arguments]

    def start(self, *arguments: str) -> None:
        """Start, and wait until the store is joined."""
        super().start(*arguments)
        wait_until(lambda: self.stats()["store.state"] == "ok", "the store is joined")

    def wait_published(self, chunks: int) -> None:
        """Until so many chunks were published."""
        wait_until(lambda: self.stats()["store.published_chunks"] >= chunks, f"{chunks} chunks are published")


if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.rigs.store.scripted_library", sys.argv.pop(1))
    vars(tier)["StoreTier"] = partial(tier.StoreTier, command=command)
    main()
