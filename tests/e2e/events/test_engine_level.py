"""Level 0 end to end: block pools over real daemons, and routers that know what is in their blocks."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.router_events.columns import unpack_chunks
from tests.rigs.daemon import ANSWER_TIMEOUT_S, Daemon, Start, wait_connected, wait_until
from tests.rigs.events.publishing import local_events, router_of
from tests.rigs.events.router import Router
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.nodes.two_nodes import assert_converged

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.blocks.prefix_engine import KV_BYTES, LAYERS, PrefixEngine

pytestmark = pytest.mark.torch

CHUNK = 8
LAYOUT = kv.Layout(layers=LAYERS, kv_heads=1, head_dim=KV_BYTES, dtype="uint8", chunk_tokens=CHUNK)
PROMPT = list(range(100, 100 + 5 * CHUNK + 3))
OTHER = list(range(900, 900 + 4 * CHUNK + 1))
MEDIA = {"GPU": kv.Level.HBM, "CPU": kv.Level.DRAM}


class Node:
    """A daemon, its engines, and a router."""

    def __init__(self, daemon: Daemon, router: Router) -> None:
        self.daemon = daemon
        self.router = router
        self.pools: list[kv.Pool] = []
        self.engines: list[PrefixEngine] = []

    def engine(self, num_blocks: int = 64, timeout_s: float = ANSWER_TIMEOUT_S, **options: Any) -> PrefixEngine:
        """A fresh engine with a connection of its own."""
        pool = self.daemon.connect(LAYOUT, timeout_s=timeout_s)
        wait_connected(pool)
        self.pools.append(pool)
        self.engines.append(PrefixEngine(num_blocks, pool=pool, **options))
        return self.engines[-1]

    def stored(self) -> dict[str, set[bytes]]:
        """Chunks by medium, as the daemon's snapshot has them."""
        found: dict[str, set[bytes]] = {medium: set() for medium in MEDIA}
        with self.daemon.admin() as admin:
            cursor = 0
            while cursor >= 0:
                page = admin.snapshot(cursor)
                for chunk in unpack_chunks(page.chunks):
                    for medium, level in MEDIA.items():
                        if chunk.tiers >> level & 1:
                            found[medium].add(chunk.key)
                cursor = page.cursor
        return found

    def assert_converged(self, engines: list[PrefixEngine] | None = None) -> None:
        """Until the snapshot has at level 0 what the engines' trees have, and the router what the snapshot has."""
        living = self.engines if engines is None else engines

        def is_known() -> bool:
            stored = self.stored()
            known = {medium: set(self.router.index.media.get(medium, {})) for medium in MEDIA}
            hashes = {medium: {int.from_bytes(key[-8:], "big") for key in keys} for medium, keys in stored.items()}
            return stored["GPU"] == in_trees(living) and known == hashes

        self.router.receive_until(is_known, "daemon and router have what is in the block pools")
        assert self.router.gaps == 0
        assert self.daemon.problems() == []


def in_trees(engines: list[PrefixEngine]) -> set[bytes]:
    """Keys of the whole chunks in the prefix trees, computed by the Pool from their tokens alone."""
    found = set()
    for engine in engines:
        pool = engine.blocks._link._pool
        assert pool is not None
        for node in engine.blocks._tree.blocks().values():
            tokens = b"".join(part.tokens for part in node.path())
            if node.key and len(tokens) % (4 * CHUNK) == 0:
                ids = [int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4)]
                found.add(pool.keys(ids, salt=node.scope.salt, adapter=node.scope.adapter)[-1])
    return found


@pytest.fixture
def node(start_daemon: Start, tmp_path: Path) -> Iterator[Node]:
    daemon = start_daemon(**local_events(tmp_path), events__republish_interval="0s")
    with router_of(daemon) as router:
        rig = Node(daemon, router)
        yield rig
        for engine in rig.engines:
            engine.blocks.close()
        for pool in rig.pools:
            pool.close()


def test_a_router_knows_the_chunks_in_a_block_pool_as_they_come_and_go(node: Node) -> None:
    engine = node.engine(num_blocks=24, offload_wait_s=10.0)
    for number in range(8):
        prompt = [1000 * number + at for at in range(3 * CHUNK + 5)]
        assert engine.run(number, prompt, salt=b"tenant" if number % 2 else None) == 0
        node.assert_converged()
        assert node.router.index.media["GPU"]
        if number:
            engine.free(number - 1)
    assert engine.blocks.stats()["evicted_blocks"] > 0
    assert engine.blocks.stats()["failed_reports"] == 0
    prompt = [1000 * 7 + at for at in range(3 * CHUNK)]
    assert node.router.index.longest(prompt, CHUNK, salt=kv_tag(b"tenant")) == 3


def kv_tag(salt: bytes) -> str:
    """A salt's tag as events have it."""
    from kvpool.keys import salt_tag

    return salt_tag(salt).hex()


def test_a_computed_chunk_is_at_level_0_before_anything_is_saved_and_stays_when_it_is(node: Node) -> None:
    engine = node.engine()
    engine.run("a", PROMPT)
    node.assert_converged()
    assert {medium: len(keys) for medium, keys in node.stored().items()} == {"GPU": 5, "CPU": 0}
    assert node.daemon.stats()["events.engine_chunks"] == 5
    with node.daemon.admin() as admin:
        (history,) = admin.chunk_history([min(node.stored()["GPU"])])
    assert (history["state"], history["tiers"]) == ("stored", ["hbm"])
    engine.free("a")
    wait_until(lambda: len(node.stored()["CPU"]) == 5, "it is saved")
    node.assert_converged()
    assert node.stored()["GPU"] == node.stored()["CPU"]


def test_two_block_pools_over_one_connection_are_counted_apart(node: Node) -> None:
    first = node.engine()
    second = PrefixEngine(64, pool=first.blocks._link._pool)
    node.engines.append(second)
    first.run("a", PROMPT)
    second.run("a", PROMPT)
    second.run("b", OTHER)
    node.assert_converged()
    second.blocks.close()
    node.assert_converged([first])


def test_everything_is_reported_anew_to_the_next_daemon(node: Node) -> None:
    engine = node.engine()
    engine.run("a", PROMPT)
    node.assert_converged()
    node.daemon.kill()
    wait_until(lambda: not node.pools[0].connected, "the daemon is away")
    engine.run("b", OTHER)  # what happens meanwhile is among it
    engine.free("a")
    node.daemon.start()
    wait_connected(node.pools[0])
    node.router.begin_anew()
    node.assert_converged()
    assert len(node.stored()["GPU"]) == 9


def test_a_daemon_that_hangs_costs_the_engine_nothing_and_gets_everything_when_it_goes_on(node: Node) -> None:
    engine = node.engine(num_blocks=24, timeout_s=2.0)
    engine.run("a", PROMPT)
    node.assert_converged()
    node.daemon.signal(signal.SIGSTOP)
    try:
        engine.blocks.free("a")
        del engine.tokens["a"], engine.computed["a"]
        for number in range(6):
            assert engine.run(number, [1000 * number + at for at in range(2 * CHUNK + 1)]) == 0
            engine.free(number)
        engine.verify()
    finally:
        node.daemon.signal(signal.SIGCONT)
    wait_connected(node.pools[0])
    node.assert_converged()


def test_another_node_knows_a_chunk_when_the_node_has_it_and_not_when_an_engine_has(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path) as (owner, here),
        owner.connect(LAYOUT) as there,
        here.connect(LAYOUT) as pool,
    ):
        for one in (there, pool):
            wait_connected(one)
        engine = PrefixEngine(64, pool=there)
        engine.run("a", PROMPT)
        engine.run("b", OTHER)
        engine.free("b")
        wait_until(lambda: owner.stats()["events.engine_chunks"] == 9, "all are reported")
        wait_until(lambda: pool.lookup(pool.keys(OTHER)).chunks == 4, "what is saved is known")
        assert here.stats()["peer.known_chunks"] == 4
        assert_converged(owner, here)
        assert pool.lookup(pool.keys(PROMPT)).chunks == 0
        with owner.admin() as admin:
            admin.flush(None, None)
        wait_until(lambda: here.stats()["peer.known_chunks"] == 0, "what only an engine has is known no more")
        engine.blocks.close()


def test_a_block_pool_that_nobody_closed_ends_with_its_last_reference(node: Node) -> None:
    import gc

    pool = node.daemon.connect(LAYOUT)
    wait_connected(pool)
    node.pools.append(pool)
    engine = PrefixEngine(64, pool=pool)
    engine.run("a", PROMPT)
    wait_until(lambda: len(node.stored()["GPU"]) == 5, "it has reported")
    del engine
    gc.collect()
    node.assert_converged()
    assert node.stored()["GPU"] == set()
