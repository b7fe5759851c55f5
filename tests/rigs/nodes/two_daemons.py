"""Two daemons that are peers, each with options of its own, and loads of what one has by an engine of the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import kvpool_client as kv
from kvpool.peers.control.link import WRONG_KEYS
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.nodes.two_nodes import assert_converged
from tests.rigs.payload import assert_right_bytes
from tests.rigs.runs.ports import free_port

CHUNKS = 40


def options_of(name: str, port: int, *others: int) -> dict[str, str]:
    return {
        "peer.listen": f"tcp://127.0.0.1:{port}",
        "peer.stream": "tcp://127.0.0.1:0",
        "peer.name": name,
        "peer.shm": "false",
        "peer.members": ", ".join(f"127.0.0.1:{other}" for other in (port, *others)),
    }


@contextmanager
def two_daemons(directory: Path, may_follow: bool = True, /, **further: str) -> Iterator[tuple[Daemon, Daemon]]:
    """Two peers, which know of each other what is so in the end; not `may_follow`: they refuse one another. Options that
    differ: `owner__NAME`, `here__NAME`."""
    ports = free_port(), free_port()
    named = []
    for name, port, other in (("owner", ports[0], ports[1]), ("here", ports[1], ports[0])):
        (directory / name).mkdir()
        own = {
            key.removeprefix(f"{name}__").replace("__", "."): value
            for key, value in further.items()
            if key.startswith(f"{name}__")
        }
        named.append((directory / name, {**options_of(name, port, other), **own}))
    (path_a, options_a), (path_b, options_b) = named
    with Daemon(path_a, **options_a) as owner, Daemon(path_b, **options_b) as here:
        yield owner, here
        for daemon in (owner, here):
            problems = daemon.problems() if daemon.is_running else []
            assert [one for one in problems if may_follow or WRONG_KEYS not in one] == []
        if may_follow and owner.is_running and here.is_running:
            assert_converged(owner, here)


def load(pool: kv.Pool, keys: kv.KeyChain, chunks: int) -> kv.LoadResult:
    """Load what there is of a chain, and compare its bytes."""
    into = np.zeros((chunks, SMALL.chunk_bytes), np.uint8)
    lease = pool.acquire(pool.lookup(keys))
    result = pool.load(lease, into=into[: lease.chunks]).wait()
    lease.release()
    assert_right_bytes(keys, SMALL, result, into)
    return result
