"""Bursts of leases whose windows are on another node: each is one pull of each group, and all of them are served."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from tests.e2e.remote.test_two_daemons import two_daemons
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import CHUNK, load, payloads, store
from tests.rigs.payload import tokens_of

LEASES, CHUNKS, WINDOW_CHUNKS = 16, 24, 18
# Of a load, and of an answer of the other node: what is tested is whether leases are granted, on a busy machine too.
TIMEOUT_S = 20.0
WINDOWED = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=2, kv_heads=2, head_dim=16, dtype="float16"),
        kv.Group(kind="window", window=WINDOW_CHUNKS * CHUNK, layers=3, kv_heads=1, head_dim=16, dtype="float16"),
    ),
)


class Reader:
    """Leases and loads of one node's engines, all of which begin at once; bytes that are loaded are right, or it fails."""

    def __init__(self, pools: list[kv.Pool], chains: list[kv.KeyChain]) -> None:
        self.pools = pools
        self.chains = chains

    def wait_known(self, chunks: int = CHUNKS) -> None:
        wait_until(lambda: all(self.pools[0].lookup(keys).chunks == chunks for keys in self.chains), "all are known")

    def load_all(self) -> list[int]:
        """The chunks that each lease has brought."""
        start, loaded = threading.Barrier(len(self.chains)), [-1] * len(self.chains)

        def load_one(number: int) -> None:
            pool, keys = self.pools[number % len(self.pools)], self.chains[number]
            hit = pool.lookup(keys)
            start.wait()
            with pool.acquire(hit) as lease:
                if not lease.chunks:
                    loaded[number] = 0
                    return
                result, found = load(pool, lease)
                if result.reason == "complete":
                    for right, here in zip(payloads(keys, pool.layout, lease.ranges), found, strict=True):
                        assert np.array_equal(right, here)
                loaded[number] = result.chunks

        threads = [threading.Thread(target=load_one, args=(number,)) for number in range(len(self.chains))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert -1 not in loaded, "a lease has ended with an error"
        return loaded


@contextmanager
def readers(here: Daemon, there: kv.Pool, connections: int) -> Iterator[Reader]:
    with ExitStack() as stack:
        pools = [stack.enter_context(here.connect(WINDOWED, timeout_s=TIMEOUT_S)) for _ in range(connections)]
        yield Reader(pools, [there.keys(tokens_of(number, CHUNKS * CHUNK + 1)) for number in range(LEASES)])


@pytest.mark.timed
@pytest.mark.parametrize("connections", [1, LEASES])
@pytest.mark.parametrize("shm", ["false", "true"])
def test_all_of_many_leases_at_once_are_served(connections: int, shm: str, tmp_path: Path) -> None:
    """Over the stream, and out of the owner's memory."""
    options = {f"{node}__peer__shm": shm for node in ("owner", "here")}
    options |= {f"here__peer__{bound}_timeout": f"{TIMEOUT_S:g}s" for bound in ("answer", "stall")}
    with (
        two_daemons(tmp_path, **options) as (owner, here),
        owner.connect(WINDOWED) as there,
        readers(here, there, connections) as reader,
    ):
        for keys in reader.chains:
            store(there, keys, [CHUNKS])
        reader.wait_known()
        assert reader.load_all() == [CHUNKS] * LEASES
        groups = len(WINDOWED.groups)
        assert owner.stats()["peer.asked.pulls"] == groups * LEASES, "one of each group"
        assert here.stats()["peer.pulled_chunks"] == (CHUNKS + WINDOW_CHUNKS) * LEASES
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's leases have ended")


def test_a_burst_at_a_node_that_has_ended_leaves_what_is_here(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path) as (owner, here),
        owner.connect(WINDOWED) as there,
        readers(here, there, LEASES) as reader,
    ):
        for keys in reader.chains:
            store(reader.pools[0], keys, [4], chunks=4)
            store(there, keys, [CHUNKS])
        reader.wait_known()
        owner.kill()
        assert set(reader.load_all()) <= {0, 4}
        wait_until(lambda: reader.load_all() == [4] * LEASES, "each has what is here")
        wait_until(lambda: here.stats()["peer.pulls_under_way"] == 0, "no pull is left")
