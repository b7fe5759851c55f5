"""Host pools beside the KV: sliding windows, states of Mamba, indexers, drafts, moved as HiCache's hybrid controller does."""

import importlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool_client.sglang import Shard, describe_host_pool
from kvpool_client.sglang.hit_policy import prefixes_of
from kvpool_client.sglang.sidecars import shard_of
from tests.engines.conftest import TIMEOUT_S
from tests.engines.sglang import standin
from tests.engines.sglang.hybrid import HybridController, IndexerPool, LogicalPool, MambaPool, OpaquePool, Sidecar
from tests.engines.sglang.standin import HostPool, Injector, PoolHitPolicy, PoolName, PoolTransfer, page_keys
from tests.rigs.daemon import Daemon, wait_until

StartHybrid = Callable[..., HybridController]
WINDOW_PAGES = 2


class MLATokenToKVPoolHost(HostPool):
    """A draft's pool of the class that SGLang replicates."""


def _window() -> Sidecar:
    return Sidecar(HostPool(layer_num=2, seed=1), trailing=WINDOW_PAGES)


def _mamba() -> Sidecar:
    return Sidecar(MambaPool(), trailing=1)


def _draft(pool: Any = None) -> Sidecar:
    return Sidecar(pool or HostPool(seed=2))


@pytest.fixture
def start_hybrid(weights: str) -> Any:
    """Makes a backend, registers a model's host pools and hands all to a hybrid controller."""
    made = []
    with standin.installed():

        def make(
            daemon: Daemon, sidecars: dict[str, Sidecar], pool: Any = None, *, waits: bool = True, **fields: Any
        ) -> HybridController:
            from kvpool_client.sglang import KVPoolStorage

            extra = {"interface_v1": 1, "socket": daemon.socket, "revision": weights}
            extra |= {"timeout_s": TIMEOUT_S, "batch_timeout_s": TIMEOUT_S}
            config = standin.StorageConfig(extra_config=extra | fields.pop("extra", {}), **fields)
            backend = KVPoolStorage(config, {})  # type: ignore[operator]
            made.append(backend)
            controller = HybridController(backend, pool or HostPool(), sidecars, standin)
            names = [f"{name}.connected" for name in sidecars]
            if waits:
                wait_until(lambda: all(backend.counters().get(name) == 1 for name in names), "all pools are connected")
            return controller

        yield make
        for backend in made:
            backend.close()


MODELS: dict[str, Callable[[], dict[str, Sidecar]]] = {
    "window": lambda: {"swa": _window()},
    "mamba": lambda: {"mamba": _mamba()},
    "indexer": lambda: {"indexer": Sidecar(IndexerPool())},
    "draft": lambda: {"draft": _draft()},
    "all": lambda: {"swa": _window(), "mamba": _mamba(), "indexer": Sidecar(IndexerPool()), "draft": _draft()},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_second_engine_gets_every_pool_of_the_first(
    shared_daemon: Daemon, start_hybrid: StartHybrid, model: str
) -> None:
    first, keys = start_hybrid(shared_daemon, MODELS[model]()), page_keys(1, 9)
    assert first.prefetch(keys) == 0
    assert first.backup(keys)
    second = start_hybrid(shared_daemon, MODELS[model]())
    assert second.prefetch(keys) == 9
    for name, sidecar in second.sidecars.items():
        pages = sidecar.trailing or 9
        assert first.backend.counters()[f"{name}.saved_pages"] == pages, "what SGLang asked for and nothing else"
        assert second.backend.counters()[f"{name}.loaded_pages"] == pages
    wait_until(lambda: shared_daemon.stats()["leases"] == 0, "the leases have ended")
    assert shared_daemon.problems() == []


def test_pages_of_windows_and_states_are_stored_at_ends_of_nodes_alone(
    shared_daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    controller, keys = start_hybrid(shared_daemon, {"swa": _window(), "mamba": _mamba()}), page_keys(2, 8)
    before = shared_daemon.stats()["saved_chunks"]
    assert controller.backup(keys)
    parts_of_a_state = 3
    assert shared_daemon.stats()["saved_chunks"] - before == 8 + WINDOW_PAGES + parts_of_a_state


def test_a_prompt_goes_on_at_the_stored_ends_and_nowhere_between(
    shared_daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    controller, keys = start_hybrid(shared_daemon, {"swa": _window(), "mamba": _mamba()}), page_keys(3, 8)
    assert controller.backup(keys[:3])
    assert controller.backup(keys[:6])
    found = controller.query(keys)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 6, "mamba": 6}
    assert controller.query(keys[:5]).kv_hit_pages == 3
    assert controller.prefetch(keys[:5]) == 3
    other = [*keys[:6], *page_keys(4, 2)]
    assert controller.prefetch(other) == 6


def test_a_window_longer_than_the_prompt_needs_all_of_it(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    controller, keys = start_hybrid(shared_daemon, {"swa": Sidecar(HostPool(seed=1), trailing=5)}), page_keys(5, 7)
    assert controller.backup(keys[:3])
    assert controller.query(keys[:3]).restorable_prefix_pages == [1, 2, 3]
    assert controller.backup(keys)
    assert controller.query(keys).restorable_prefix_pages == [1, 2, 3, 4, 5, 6, 7]


def test_an_evicted_page_of_a_full_pool_ends_the_prefix_before_it(
    shared_daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    controller, keys = start_hybrid(shared_daemon, {"indexer": Sidecar(IndexerPool())}), page_keys(6, 6)
    assert controller.backup(keys[:4])
    for page, key in enumerate(keys):
        controller.pool.fill(page, key)
    assert all(controller.backend.batch_set_v1(keys, controller.pool.slots(range(6))))
    found = controller.query(keys)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (4, {"kv": 6, "indexer": 4})
    assert controller.backend.batch_exists(keys) == 6
    assert controller.prefetch(keys) == 4


def test_a_flipped_bit_in_a_state_is_a_miss_of_its_prefix(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    controller, keys = start_hybrid(shared_daemon, {"mamba": _mamba()}), page_keys(7, 4)
    assert controller.backup(keys[:2])
    assert controller.backup(keys)
    pages = describe_host_pool(controller.sidecars["mamba"].pool, Shard(), "mamba")[2]
    with shared_daemon.connect(pages.layout, model=controller.backend._store.model, timeout_s=TIMEOUT_S) as pool:
        wait_until(lambda: pool.connected, "connected")
        chain = pool.keys_from_hashes([bytes.fromhex(keys[3])], block_tokens=1)
        with pool.acquire(pool.lookup(chain)) as lease:
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[int(lease.hold.rows.offsets[0]) + 5] ^= 1
    assert controller.query(keys).kv_hit_pages == 4
    assert controller.prefetch(keys) == 0
    assert controller.query(keys).restorable_prefix_pages == [2]
    assert controller.prefetch(keys) == 2


def test_a_logical_pool_of_kv_has_what_the_others_have(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    """DeepSeek V4: the KV's host pool counts slots, and compressed pools have the bytes."""
    sidecars = {"indexer": Sidecar(IndexerPool()), "swa": _window()}
    controller, keys = start_hybrid(shared_daemon, sidecars, LogicalPool()), page_keys(8, 6)
    assert controller.query(keys).kv_hit_pages == 0
    assert controller.backup(keys)
    assert controller.query(keys).kv_hit_pages == 6
    assert controller.prefetch(keys) == 6
    assert controller.backend.batch_exists(keys) == 0
    assert controller.backend.batch_exists_v2(keys).kv_hit_pages == 0
    bare = start_hybrid(shared_daemon, {}, LogicalPool())
    assert bare.backend.batch_set_v1(keys, bare.pool.slots(range(6))) == [False] * 6
    assert bare.backend.batch_get_v1(keys, bare.pool.slots(range(6))) == [False] * 6


def test_states_are_each_ranks_own_and_replicated_pools_are_stored_once(
    shared_daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    """Kimi: replicated MLA KV beside states of Mamba that are divided among the ranks."""
    keys, of_both = page_keys(9, 4), {"tp_size": 2, "is_mla_model": True}
    ranks = [
        start_hybrid(
            shared_daemon,
            {"mamba": _mamba(), "indexer": Sidecar(IndexerPool())},
            HostPool(layout="mla"),
            tp_rank=rank,
            **of_both,
        )
        for rank in range(2)
    ]
    mamba = ranks[1].sidecars["mamba"].pool
    mamba.fill(0, keys[3], rank=1)
    transfer = PoolTransfer(PoolName.MAMBA, mamba.slots([0]), keys=keys[3:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert ranks[1].backend.batch_set_v2([transfer]) == {"mamba": [True]}
    assert ranks[0].backup(keys)
    assert [each.query(keys).kv_hit_pages for each in ranks] == [4, 4]
    assert ranks[0].backend.counters()["mamba.saved_pages"] == 1
    mamba.clear()
    assert ranks[1].backend.batch_get_v2([transfer]) == {"mamba": [True]}
    assert mamba.holds(0, keys[3], rank=1)


def test_a_draft_with_heads_beside_replicated_kv_is_refused(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    keys, fields = page_keys(10, 3), {"tp_size": 2, "is_mla_model": True}
    refused = start_hybrid(shared_daemon, {"draft": _draft()}, HostPool(layout="mla"), waits=False, **fields)
    assert not refused.backup(keys)
    assert refused.prefetch(keys) == 0
    assert refused.backend.counters()["refused_draft"] >= 3
    replicated = {"draft": _draft(MLATokenToKVPoolHost(layout="mla", seed=3))}
    served = start_hybrid(shared_daemon, replicated, HostPool(layout="mla"), **fields)
    assert served.backup(keys)
    assert served.prefetch(keys) == 3


def test_pools_are_divided_as_sglang_divides_them() -> None:
    one, two = Shard(is_replicated=True, tp_size=2), Shard(tp_size=2)
    pool, draft = HostPool(), MLATokenToKVPoolHost()
    replicated = {name: shard_of(pool, name, one).is_replicated for name in ("mamba", "swa", "indexer", "draft")}
    assert replicated == {"mamba": False, "swa": True, "indexer": True, "draft": False}
    assert shard_of(draft, "draft", one).is_replicated
    assert not shard_of(draft, "draft", two).is_replicated


def test_drafts_and_their_targets_are_names_of_their_own(
    shared_daemon: Daemon, start_hybrid: StartHybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools with KV of a draft are shared where the draft is the same; those of the target where the target is."""
    storage = importlib.import_module("kvpool_client.sglang.storage")

    def engine(draft: str | None, **fields: Any) -> HybridController:
        args = types.SimpleNamespace(model_path="m", speculative_draft_model_path=draft, speculative_algorithm="EAGLE")
        monkeypatch.setattr(storage, "server_args_of_process", lambda: args)
        return start_hybrid(shared_daemon, {"draft": _draft()}, **fields)

    keys = page_keys(11, 3)
    first = engine("draft-1")
    assert first.backup(keys)
    assert engine("draft-1").prefetch(keys) == 3
    other = engine("draft-2")
    assert other.backend.batch_exists(keys) == 3
    assert other.prefetch(keys) == 0
    nameless = engine(None, waits=False, extra={"revision": ""})
    assert not nameless.backup(keys)
    assert nameless.backend.counters()["refused_weights"] > 0
    assert first.backend.clear() is True
    assert (first.backend.batch_exists(keys), engine("draft-1").query(keys).kv_hit_pages) == (0, 0)


def test_kv_with_a_packed_draft_is_named_after_both(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    packed = HostPool()
    packed.target_layer_num = packed.layer_num - 1  # type: ignore[attr-defined]  # of SGLang's class alone
    plain, drafting = (
        start_hybrid(shared_daemon, {"swa": _window()}),
        start_hybrid(shared_daemon, {"swa": _window()}, packed),
    )
    assert drafting.backend._store.model != plain.backend._store.model
    assert drafting.backup(page_keys(12, 2))
    assert plain.backend.batch_exists(page_keys(12, 2)) == 0


def test_a_pool_that_sglang_adds_later_is_served_from_then_on(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    controller, keys = start_hybrid(shared_daemon, {}), page_keys(13, 4)
    late = _draft()
    transfer = PoolTransfer(PoolName.DRAFT, late.pool.slots(range(4)), keys=keys)
    assert controller.backup(keys)
    assert controller.backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert controller.backend.batch_set_v2([transfer]) == {"draft": [False] * 4}
    assert controller.backend.batch_get_v2([transfer]) == {"draft": [False] * 4}
    assert controller.backend.counters()["refused_sidecars"] == 12
    controller.backend.register_mem_host_pool_v2(late.pool, PoolName.DRAFT)
    controller.sidecars = {"draft": late}
    wait_until(lambda: controller.backend.counters()["draft.connected"] == 1, "connected")
    assert controller.backup(keys)
    assert controller.prefetch(keys) == 4


def test_a_pool_that_cannot_be_described_leaves_the_whole_model_without_the_pool(
    shared_daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    class Shared(IndexerPool):
        shared_allocation_domain = object()

    before = shared_daemon.stats()["saved_chunks"]
    controller, keys = start_hybrid(shared_daemon, {"indexer": Sidecar(Shared())}, waits=False), page_keys(14, 3)
    assert not controller.backup(keys)
    assert controller.prefetch(keys) == 0
    assert controller.backend.batch_exists(keys) == 0
    assert controller.backend.counters()["refused_layout"] > 0
    assert shared_daemon.stats()["saved_chunks"] == before


def test_block_groups_never_decide_and_unknown_policies_do(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    controller, keys = start_hybrid(shared_daemon, {"indexer": Sidecar(IndexerPool())}), page_keys(15, 3)
    assert controller.backup(keys)
    transfer = PoolTransfer(PoolName.SWA, None, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert controller.backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 3
    transfer = PoolTransfer(PoolName.INDEXER, None, keys=keys, hit_policy="every_other_page")  # type: ignore[arg-type]
    assert controller.backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0


@pytest.mark.parametrize(
    ("policy", "present", "trailing", "lengths"),
    [
        ("all_pages", [1, 1, 0, 1], 0, [1, 2]),
        ("all_pages", [], 0, []),
        ("trailing_pages", [0, 0, 1, 0, 1], 1, [3, 5]),
        ("trailing_pages", [0, 1, 1, 1, 0, 1], 2, [3, 4]),
        ("trailing_pages", [1, 1, 0, 1], 3, [1, 2]),
        ("trailing_pages", [0, 1], 0, [2]),
        ("none of them", [1, 1], 1, []),
    ],
)
def test_a_policy_gives_the_prefixes_that_can_be_restored(
    policy: str, present: list[int], trailing: int, lengths: list[int]
) -> None:
    assert prefixes_of(policy, [bool(each) for each in present], trailing) == lengths


def test_pools_are_asked_for_addresses_by_tensors() -> None:
    """As SGLang does: some of its pools call methods that numpy's arrays lack."""
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")

    class OfTensors(IndexerPool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            assert isinstance(indices, torch.Tensor)
            return super().get_page_buffer_meta(indices)

    assert describe_host_pool(OfTensors(), Shard(), "indexer")[0].page_tokens == 4


def test_parts_of_one_stride_are_stored_together_and_others_apart() -> None:
    found = describe_host_pool(MambaPool(slots=5, layers=2), Shard(), "mamba")
    assert [(pages.layout.layers, pages.layout.chunk_bytes) for pages in found] == [(1, 8192), (1, 1536), (1, 768)]
    assert len({pages.layout.format for pages in found}) == 3
    pool = OpaquePool([192, 128, 192], pages=4, page_size=4)
    for part in pool.parts:
        part[...] = np.random.default_rng(3).integers(0, 256, part.shape, dtype=np.uint8)
    keys, values = describe_host_pool(pool, Shard())
    assert np.array_equal(np.hstack(keys.parts), np.hstack(pool.parts[::2]))
    assert np.array_equal(np.hstack(values.parts), pool.parts[1])
    assert keys.layout.format != describe_host_pool(pool, Shard(), "swa")[0].layout.format


@pytest.mark.parametrize("slots", [None, np.arange(5), np.array([[0]]), "slots"])
def test_slots_that_are_none_of_a_pool_are_misses(shared_daemon: Daemon, start_hybrid: StartHybrid, slots: Any) -> None:
    controller, keys = start_hybrid(shared_daemon, {"mamba": _mamba()}), page_keys(18, 3)
    assert controller.backup(keys)
    transfer = PoolTransfer(PoolName.MAMBA, slots, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert controller.backend.batch_get_v2([transfer]) == {"mamba": [False] * 3}
    assert controller.backend.batch_set_v2([transfer]) == {"mamba": [False] * 3}
    assert controller.prefetch(keys) == 3


def test_a_page_whose_parts_are_not_all_there_is_none(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    """The state of the last page is there, one of its convolutions is not."""
    controller, keys = start_hybrid(shared_daemon, {"mamba": _mamba()}), page_keys(19, 3)
    assert controller.backup(keys)
    last = controller.backend._sidecars.find_store("mamba")._parts[1]
    chain = last._pool.keys_from_hashes([bytes.fromhex(keys[2])], block_tokens=1)
    with last._pool.acquire(last._pool.lookup(chain)) as lease:
        lease.hold.session.arena.view()[int(lease.hold.rows.offsets[0])] ^= 1
    assert controller.query(keys).kv_hit_pages == 3
    assert controller.prefetch(keys) == 0
    assert controller.query(keys).kv_hit_pages == 0
    assert controller.backup(keys)
    assert controller.prefetch(keys) == 3


def test_keys_and_values_of_other_sizes_come_back(shared_daemon: Daemon, start_hybrid: StartHybrid) -> None:
    """Models whose heads are wider for keys than for values."""
    first = start_hybrid(shared_daemon, {}, OpaquePool([3 * 768, 3 * 512], pages=8, page_size=4))
    keys = page_keys(16, 5)
    wait_until(lambda: first.backend.counters()["connected"] == 1, "connected")
    assert first.backup(keys)
    assert first.prefetch(keys) == 5
    assert first.backend.counters()["saved_pages"] == 5


@pytest.mark.parametrize("part_bytes", [[4096, 0], [], [66, 64]])
def test_pages_whose_parts_are_none_are_refused(
    shared_daemon: Daemon, start_hybrid: StartHybrid, part_bytes: list[int]
) -> None:
    odd = Sidecar(OpaquePool(part_bytes, pages=4, page_size=4))
    controller = start_hybrid(shared_daemon, {"indexer": odd}, waits=False)
    assert not controller.backup(page_keys(16, 2))
    assert controller.backend.counters()["refused_layout"] > 0


def test_injected_failures_bring_no_other_bytes(shared_daemon: Daemon, start_hybrid: StartHybrid, seed: int) -> None:
    controller = start_hybrid(shared_daemon, MODELS["all"]())
    controller.backend = Injector(controller.backend, failure=0.2, seed=seed)
    fetched = 0
    for turn in range(24):
        keys = page_keys(100 + turn % 5, 3 + turn % 5)
        controller.backup(keys)
        fetched += controller.prefetch(keys)
    assert fetched > 0


def test_a_killed_daemon_costs_the_pages_of_every_pool_and_nothing_else(
    daemon: Daemon, start_hybrid: StartHybrid
) -> None:
    controller, keys = start_hybrid(daemon, MODELS["all"](), extra={"timeout_s": 10.0}), page_keys(17, 5)
    assert controller.backup(keys)
    daemon.kill()
    controller.prefetch(keys)
    assert not controller.backup(keys)
    daemon.start()
    wait_until(lambda: controller.backup(keys), "every pool is stored again")
    assert controller.prefetch(keys) == 5
