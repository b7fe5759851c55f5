"""Block pool over a real daemon: offload, restart of the engine, short loads, a daemon that dies, hangs or is small."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.errors import LayoutMismatch
from kvpool_client.connection.session import Session
from kvpool_client.verbs.save import Save
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.payload import flip_bit

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import BlockPool
from tests.rigs.blocks.prefix_engine import DEVICE, KV_BYTES, LAYERS, PrefixEngine

pytestmark = pytest.mark.torch

CHUNK = 8
LAYOUT = kv.Layout(layers=LAYERS, kv_heads=1, head_dim=KV_BYTES, dtype="uint8", chunk_tokens=CHUNK)
PROMPT = list(range(100, 100 + 5 * CHUNK + 3))


class Engines:
    """Engines of one node, one after another, of a model of their own."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self._daemon, self._model = daemon, model
        self.pools: list[kv.Pool] = []

    def start(self, num_blocks: int = 64, *, timeout_s: float = 60.0, **options: Any) -> PrefixEngine:
        """A fresh engine with a Pool and blocks of its own."""
        pool = self._daemon.connect(LAYOUT, model=self._model, timeout_s=timeout_s)
        wait_connected(pool)
        self.pools.append(pool)
        return PrefixEngine(num_blocks, pool=pool, **options)


@pytest.fixture
def engines(module_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Engines]:
    rig = Engines(module_daemon, request.node.name)
    yield rig
    for pool in rig.pools:
        pool.close()


@pytest.fixture
def lonely_engines(daemon: Daemon) -> Iterator[Engines]:
    """Engines of a node that no other test uses."""
    rig = Engines(daemon, "test-model")
    yield rig
    for pool in rig.pools:
        pool.close()


def stop(engine: PrefixEngine) -> None:
    """End all requests and offload what they leave."""
    for request in list(engine.tokens):
        engine.free(request)
    engine.blocks.close()
    engine.verify()
    assert engine.blocks.num_free_blocks == engine.blocks.shape.num_blocks


def behind_another(engines: Engines) -> PrefixEngine:
    """An engine of a node where an earlier one has left the prompt."""
    first = engines.start()
    first.run("a", PROMPT)
    stop(first)
    return engines.start()


def test_a_restarted_engine_loads_what_the_first_offloaded(engines: Engines, module_daemon: Daemon) -> None:
    first = engines.start()
    assert first.run("a", PROMPT) == 0
    assert first.append("a", [7] * 6)
    tokens = first.tokens["a"]
    stop(first)
    assert first.blocks.stats()["offloaded_chunks"] == 6
    second = engines.start()
    assert second.run("a", [*tokens, 1]) == 6 * CHUNK
    assert second.run("b", [*tokens, 2]) == 6 * CHUNK
    second.verify()
    stop(second)
    assert second.blocks.stats()["offloaded_chunks"] == 0
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "all leases are released")
    assert module_daemon.problems() == []


def test_a_request_that_took_tokens_back_offloads_the_blocks_that_the_tree_has(engines: Engines) -> None:
    first = engines.start()
    first.run("a", PROMPT[: 5 * CHUNK])
    first.rewind("a", 1)
    stop(first)
    assert first.blocks.stats()["offloaded_chunks"] == 5
    assert first.blocks.stats()["declined_chunks"] == first.blocks.stats()["failures"] == 0
    second = engines.start()
    assert second.run("a", PROMPT) == 5 * CHUNK
    second.verify()


def test_what_is_computed_behind_tokens_taken_back_is_offloaded_with_its_own_tokens(engines: Engines) -> None:
    first = engines.start()
    first.run("a", PROMPT[: 4 * CHUNK])
    first.rewind("a", 3)
    assert first.append("a", [7] * 11)
    tokens = first.tokens["a"]
    stop(first)
    assert first.blocks.stats()["declined_chunks"] == first.blocks.stats()["failures"] == 0
    second = engines.start()
    assert second.run("a", [*tokens, 1]) == len(tokens) == 5 * CHUNK
    second.verify()


@pytest.mark.parametrize(("raising", "stored"), [(1, 3), (2, 0)])
@pytest.mark.parametrize("verb", ["save", "layer", "commit"])
def test_a_save_that_raises_is_tried_once_more(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, module_daemon: Daemon, verb: str, raising: int, stored: int
) -> None:
    target: Any = kv.Pool if verb == "save" else Save
    works, failures = getattr(target, verb), [RuntimeError("can't start new thread")] * raising

    def fails(*arguments: Any, **others: Any) -> Any:
        if failures:
            raise failures.pop()
        return works(*arguments, **others)

    monkeypatch.setattr(target, verb, fails)
    engine = engines.start()
    for _ in range(3):
        engine.run("a", PROMPT[: 3 * CHUNK])
        engine.free("a")
        wait_until(lambda: _saves(engine) == 0, "no save is under way")
    stop(engine)
    stats = engine.blocks.stats()
    assert (stats["failures"], stats["offloaded_chunks"]) == (raising, stored)
    wait_until(lambda: module_daemon.stats()["reservations"] == 0, "no slots are reserved")


def test_with_logits_a_prompt_of_whole_chunks_comes_whole_from_the_node(engines: Engines) -> None:
    prompt = PROMPT[: 5 * CHUNK]
    first = engines.start()
    first.run("a", prompt)
    stop(first)
    second = engines.start()
    assert second.run("a", prompt, has_logits=True) == 5 * CHUNK
    third = engines.start()
    assert third.run("a", prompt) == 4 * CHUNK
    second.verify()
    third.verify()


def test_a_small_pool_finds_old_prompts_on_the_node(engines: Engines) -> None:
    engine = engines.start(num_blocks=24, offload_wait_s=5.0)
    prompts = [[1000 * number + at for at in range(35)] for number in range(12)]
    for number, tokens in enumerate(prompts):
        assert engine.run(number, tokens) == 0
        engine.free(number)
    assert engine.blocks.stats()["dropped_unsaved"] == 0
    for number, tokens in enumerate(prompts):
        assert engine.run(number, tokens) >= 32  # type: ignore[operator]  # there is room
        engine.free(number)
        engine.verify()
    assert engine.blocks.stats()["loaded_tokens"] >= 9 * 32
    stop(engine)


def test_priorities_and_durations_reach_the_node(engines: Engines) -> None:
    engine = engines.start()
    engine.run("a", PROMPT, retention=[kv.TokenRange(0, CHUNK, 90, 600.0)], decode_priority=3)
    engine.append("a", [7] * 16)
    keys = engines.pools[0].keys(engine.tokens["a"])
    stop(engine)
    found = {record.key: record for part in engines.pools[0].snapshot() for record in part.chunks}
    priorities = [found[keys[number]].priority for number in range(len(keys))]
    assert priorities[0] == 90
    assert priorities[-1] == 3
    assert set(priorities[1:5]) == {35}


@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_load_that_comes_shorter_is_learned_at_the_layer(engines: Engines, chunk: int) -> None:
    second = behind_another(engines)
    _flip(engines.pools[0], chunk, layer=1)
    allocation = second.blocks.allocate("a", PROMPT)
    assert allocation is not None
    assert allocation.reused_tokens == 5 * CHUNK
    assert not all(allocation.wait_layer(layer) for layer in range(LAYERS))
    assert allocation.reused_tokens == chunk * CHUNK
    second.tokens["a"], second.computed["a"] = PROMPT, allocation.reused_tokens
    second.verify()
    second.compute("a")
    assert second.run("b", [*PROMPT, 1]) == len(PROMPT) // 4 * 4


def test_an_engine_that_did_not_wait_cannot_publish(engines: Engines) -> None:
    second = behind_another(engines)
    _flip(engines.pools[0], 3, layer=0)
    allocation = second.blocks.allocate("a", PROMPT)
    assert allocation is not None
    assert not second.blocks.computed("a", 5 * CHUNK, len(PROMPT))
    assert allocation.reused_tokens == 3 * CHUNK
    second.tokens["a"], second.computed["a"] = PROMPT, 3 * CHUNK
    second.verify()
    second.compute("a")
    stop(second)


def test_a_request_cancelled_during_its_load_leaves_nothing(engines: Engines, module_daemon: Daemon) -> None:
    second = behind_another(engines)
    for _ in range(20):
        assert second.blocks.allocate("a", PROMPT) is not None
        second.blocks.free("a")
        assert second.blocks.verify() == []
    assert second.run("b", PROMPT) >= 5 * CHUNK  # type: ignore[operator]  # there is room
    second.verify()
    stop(second)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "all leases are released")


def test_a_daemon_killed_during_a_load_shortens_it_and_nothing_else(lonely_engines: Engines, daemon: Daemon) -> None:
    second = behind_another(lonely_engines)
    allocation = second.blocks.allocate("a", PROMPT)
    daemon.kill()
    assert allocation is not None
    second.tokens["a"], second.computed["a"] = PROMPT, allocation.settle()
    second.verify()
    second.compute("a")
    wait_until(lambda: not lonely_engines.pools[1].connected, "the client has noticed")
    second.free("a")
    assert second.run("b", [5] * 40) == 0
    stop(second)
    daemon.start()
    third = lonely_engines.start()
    assert third.run("a", PROMPT) == 0


def test_what_a_dead_daemon_had_is_offloaded_to_the_next_one(lonely_engines: Engines, daemon: Daemon) -> None:
    first = lonely_engines.start()
    first.run("a", PROMPT)
    first.free("a")
    pool = lonely_engines.pools[0]
    epoch = pool.epoch
    daemon.kill()
    first.run("b", [3] * 30)
    first.free("b")
    daemon.start()
    wait_until(lambda: pool.epoch not in (b"", epoch), "the pool is connected to the next daemon")
    first.run("a", PROMPT)
    first.run("b", [3] * 30)
    stop(first)
    second = lonely_engines.start()
    assert second.run("a", PROMPT) == 5 * CHUNK
    assert second.run("b", [3] * 30) == 3 * CHUNK


def test_a_daemon_that_hangs_costs_one_timeout(
    lonely_engines: Engines, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lonely_engines.start(num_blocks=24, timeout_s=0.3)
    engine.run(0, PROMPT)
    engine.free(0)
    daemon.signal(signal.SIGSTOP)
    asked: list[object] = []
    call = Session.call

    def noted(session: Session, request: object, *arguments: Any) -> object:
        if threading.current_thread() is threading.main_thread():
            asked.append(request)
        return call(session, request, *arguments)

    monkeypatch.setattr(Session, "call", noted)
    for number in range(1, 8):
        tokens = [1000 * number + at for at in range(35)]
        wait_until(lambda n=number, t=tokens: engine.run(n, t) is not None, "there is room")  # type: ignore[misc]
        engine.free(number)
    assert len(asked) < 7, "the engine does not ask anew for each prompt"
    engine.verify()
    daemon.signal(signal.SIGCONT)
    stop(engine)


def test_a_node_without_room_declines_and_the_engine_goes_on(engines: Engines) -> None:
    engine = engines.start(num_blocks=40, offload_wait_s=5.0)
    keys = engines.pools[0].keys(PROMPT)
    save = engines.pools[0].save(keys, engine.blocks._link._cache, list(range(10)))
    engine.run("a", PROMPT)
    engine.free("a")
    for number in range(6):
        engine.run(number, [1000 * number + at for at in range(60)])
        engine.free(number)
    assert engine.blocks.stats()["declined_chunks"] > 0
    save.abort()
    engine.verify()
    stop(engine)


def test_blocks_that_do_not_fit_the_pools_layout_are_refused(engines: Engines) -> None:
    engines.start()
    with pytest.raises(LayoutMismatch):
        PrefixEngine(8, size=3, pool=engines.pools[0])


def _saves(engine: PrefixEngine) -> int:
    """Saves under way, after those that have ended were taken."""
    engine.blocks._link.advance()
    return engine.blocks.stats()["offloads_under_way"]


def _flip(pool: kv.Pool, chunk: int, layer: int) -> None:
    """Flip a bit of a stored chunk."""
    with pool.acquire(pool.lookup(pool.keys(PROMPT))) as lease:
        flip_bit(lease, chunk, layer * LAYOUT.layer_bytes + 5, mask=16)


WIDE = kv.Layout(layers=2, kv_heads=2, head_dim=4096, dtype="uint8", chunk_tokens=CHUNK)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (WIDE, [kv.Share(0, 1), kv.Share(1, 1)]),
        (replace(WIDE, head_groups=2), [kv.Share(0, 2, 0, 1), kv.Share(0, 2, 1, 1)]),
    ],
    ids=["stages", "head groups"],
)
def test_ranks_with_a_share_offload_their_parts_and_load_them(
    module_daemon: Daemon, layout: kv.Layout, shares: list[kv.Share]
) -> None:
    prompt = list(range(4 * CHUNK + 1))

    def of_rank(rank: int) -> tuple[kv.Pool, BlockPool]:
        share = shares[rank]
        pool = module_daemon.connect(layout, model=f"{layout.head_groups} head groups", share=share)
        wait_connected(pool)
        heads = layout.kv_heads // layout.head_groups * share.groups
        return pool, BlockPool(
            layers=share.layers,
            num_blocks=16,
            tokens_per_block=4,
            kv_heads=heads,
            head_dim=layout.head_dim,
            dtype="uint8",
            device=DEVICE,
            pool=pool,
        )

    def value(rank: int, layer: int, number: int) -> int:
        return 100 * rank + 20 * layer + number

    for is_first in (True, False):
        ranks = [of_rank(rank) for rank in range(2)]
        for rank, (_, blocks) in enumerate(ranks):
            allocation = blocks.allocate("a", prompt)
            assert allocation is not None
            assert allocation.settle() == (0 if is_first else 4 * CHUNK)
            for layer in range(blocks.shape.layers):
                for number, block in enumerate(blocks.block_ids("a")[:-1]):
                    rows = blocks.buffers(layer)[block]
                    if is_first:
                        rows[:] = value(rank, layer, number)
                    assert bool((rows == value(rank, layer, number)).all())
            blocks.computed("a", 0, len(prompt))
            blocks.free("a")
        for _, blocks in ranks:
            blocks.close()
            assert blocks.stats()["offloaded_chunks"] == (4 if is_first else 0)
            assert blocks.stats()["declined_chunks"] == 0
        for pool, _ in ranks:  # a part that others lack ends with its connection
            pool.close()
    assert module_daemon.stats()["reservations"] == 0


def test_a_long_prompt_is_offloaded_part_by_part_beside_others(engines: Engines) -> None:
    first = engines.start(num_blocks=300)
    prompts = [[9, 9, 9, number] + [7] * (40 * CHUNK) for number in range(3)]
    for number, tokens in enumerate(prompts):
        first.run(number, tokens)
    stop(first)
    assert first.blocks.stats()["declined_chunks"] == 0
    second = engines.start(num_blocks=300)
    for number, tokens in enumerate(prompts):
        assert second.run(number, tokens) == 40 * CHUNK
    second.verify()
