"""The linker without SGLang: what is promised is loaded, and what fails ends as a miss or as an offload that stored nothing."""

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from kvpool_client.sglang.part_store import PartStore
from tests.engines.sglang import linked
from tests.engines.sglang.linked import LAYERS, PAGE, MHATokenToKVPool, kv, params_of
from tests.engines.sglang.standin import PoolName, page_keys
from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
pytestmark = pytest.mark.torch
PAGES = 5


@pytest.fixture
def module() -> Iterator[Any]:
    with linked.installed():
        yield importlib.import_module("kvpool_client.sglang.linker")


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang serves: the version of its weights is in it."""
    serving = SimpleNamespace(weight_version="first")
    context = ModuleType("sglang.srt.runtime_context")
    context.get_serving = lambda: serving  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    return serving


class Rank:
    """One rank: its pool, its linker, and the calls of SGLang's tree."""

    def __init__(self, module: Any, socket: str, **extra: Any) -> None:
        self.pool = MHATokenToKVPool(torch)
        waits = dict.fromkeys(("timeout_s", "scheduler_timeout_s", "batch_timeout_s"), 20.0)
        config = {"socket": socket, "revision": "1", **waits, **extra}
        self.linker = module.KVPoolLinker(SimpleNamespace(model_path="tiny"), params_of(self.pool), extra_config=config)
        self.wait_connected()

    def wait_connected(self) -> None:
        """Until its pools are found again, under whatever name."""
        wait_until(lambda: self.linker.counters()["kv.connected"] == 1, "connected")

    def flush_cache(self) -> None:
        """As SGLang does."""
        self.linker.reset()
        self.wait_connected()

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self.linker.close()

    @property
    def buffers(self) -> list[Any]:
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    @staticmethod
    def slots(pages: range) -> Any:
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def fill(self, seed: int, pages: range) -> None:
        made = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            buffer[self.slots(pages)] = torch.randn(len(pages) * PAGE, 2, 16, generator=made).to(buffer.dtype)

    def read(self, pages: range) -> list[Any]:
        return [buffer[self.slots(pages)].clone() for buffer in self.buffers]

    def offload(self, keys: list[str], pages: range) -> bool:
        """Whether the node is in the pool now."""
        assert self.linker.offload([kv(keys, self.slots(pages))])
        wait_until(lambda: self.linker.num_completed_offloads() == 1, "the offload has ended")
        return bool(self.linker.pop_completed_offload())

    def load(self, rid: str, keys: list[str], pages: range) -> bool:
        """Queue, start, wait for each layer and finish: whether the request may go on."""
        assert self.linker.load(rid, [kv(keys, self.slots(pages))])
        index = self.linker.start_layer_wise_loading()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        return bool(self.linker.finish_layer_wise_loading(index))


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_pages_come_back_into_other_slots(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        stored = rank.read(range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)]) == []
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.start_layer_wise_loading() == -1
        assert rank.linker.lookup("a", [kv([*keys, *page_keys(2, 1)])]) == [1, 2, 3, 4, 5]
        assert rank.load("a", keys[:4], range(8, 12))
        assert _same(rank.read(range(8, 12)), [values[: 4 * PAGE] for values in stored])
    assert daemon.stats()["leases"] == 0


def test_a_lookup_again_keeps_or_replaces_the_promise(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys[:2], range(2))
        assert rank.linker.lookup("a", [kv(keys)]) == [1, 2]
        promise = rank.linker._promises.find("a")
        assert rank.linker.lookup("a", [kv(keys)]) == [1, 2]
        assert rank.linker._promises.find("a") is promise, "nothing was leased again"
        assert daemon.stats()["leases"] == 1
        assert rank.offload(keys[2:], range(2, PAGES))
        assert rank.linker.lookup("a", [kv(keys)]) == [1, 2, 3, 4, 5]
        assert rank.linker.lookup("a", [kv(page_keys(9, 3))]) == []
        assert rank.linker.counters()["promises"] == 0


def test_a_promise_ends_by_its_time_and_a_load_takes_another(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket, promise_s=0.1) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        wait_until(
            lambda: rank.linker.num_completed_offloads() == 0 and not rank.linker.counters()["promises"], "ended"
        )
        assert rank.linker.counters()["late_promises"] == 1
        assert rank.load("a", keys, range(8, 13))
        assert _same(rank.read(range(8, 13)), rank.read(range(PAGES)))
        assert rank.linker.counters()["renewed_loads"] == 1


def test_a_call_of_the_schedulers_has_a_short_limit(
    module: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stands still costs the first call that, and the next ones nothing."""
    limits: list[float | None] = []
    call = Session.call

    def noted(session: Session, request: Any, answer: Any, timeout_s: float | None = None, *rest: Any) -> Any:
        if isinstance(request, m.Acquire):
            limits.append(timeout_s)
        return call(session, request, answer, timeout_s, *rest)

    monkeypatch.setattr(Session, "call", noted)
    with Rank(module, daemon.socket, scheduler_timeout_s=0.5) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        daemon.signal(signal.SIGSTOP)
        try:
            assert rank.linker.lookup("b", [kv(keys)]) == []
            assert rank.linker.lookup("c", [kv(keys)]) == []
            assert limits == [0.5, 0.5], "no session, no request"
            assert rank.load("a", keys, range(8, 13)), "promised before"
            assert _same(rank.read(range(8, 13)), rank.read(range(PAGES)))
        finally:
            daemon.signal(signal.SIGCONT)
        rank.wait_connected()
        assert set(limits) == {0.5}


def test_connecting_behind_a_reset_holds_no_call_up(
    module: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rank(module, daemon.socket) as rank:
        keys, may_connect, made = page_keys(1, 1), threading.Event(), PartStore
        monkeypatch.setattr(
            "kvpool_client.sglang.page_store.PartStore",
            lambda *given: made(*given) if may_connect.wait() else None,
        )
        try:
            for _ in range(3):
                rank.linker.reset()
                assert rank.linker.lookup("a", [kv(keys)]) == []
                assert rank.linker.offload([kv(keys, rank.slots(range(1)))])
                wait_until(lambda: rank.linker.num_completed_offloads() == 1, "it has ended")
                assert not rank.linker.pop_completed_offload()
        finally:
            may_connect.set()
        wait_until(lambda: rank.linker.lookup("b", [kv(keys)]) == [] and rank.linker.counters()["kv.connected"], "back")
        assert rank.offload(keys, range(1))
        assert rank.linker.lookup("c", [kv(keys)]) == [1]


def test_promises_have_a_bound(module: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.sglang.promises.PROMISES_MAX", 2)
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, 1)
        assert rank.offload(keys, range(1))
        assert [rank.linker.lookup(rid, [kv(keys)]) for rid in ("a", "b", "c", "a")] == [[1], [1], [], [1]]
        assert rank.linker.counters()["unpromised"] == 1


@pytest.mark.parametrize("is_back", [False, True])
def test_a_daemon_that_dies_between_lookup_and_load_fails_no_request(
    module: Any, daemon: Daemon, *, is_back: bool
) -> None:
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        daemon.kill()
        wait_until(lambda: rank.linker.counters()["kv.connected"] == 0, "the client knows")
        if is_back:
            daemon.start()
            wait_until(lambda: rank.linker.counters()["kv.connected"] == 1, "connected again")
        assert rank.load("a", keys, range(8, 13))
        assert _same(rank.read(range(8, 13)), rank.read(range(PAGES)))
        assert rank.linker.lookup("b", [kv(keys)]) == []
        assert rank.offload(keys, range(PAGES)) == is_back


def test_without_a_promise_or_pages_the_request_computes(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        assert not rank.linker.load("a", [kv(page_keys(1, 2), rank.slots(range(2)))])
        assert rank.linker.start_layer_wise_loading() == -1


def test_a_load_that_is_cancelled_writes_nothing(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        for rid in ("a", "b"):
            assert rank.linker.lookup(rid, [kv(keys)])[-1] == PAGES
        assert rank.linker.load("a", [kv(keys, rank.slots(range(8, 13)))])
        assert rank.linker.cancel_queued_load("a")
        assert not rank.linker.cancel_queued_load("a")
        assert rank.linker.start_layer_wise_loading() == -1
        assert not any(values.any() for values in rank.read(range(8, 13)))
        rank.linker.reset()
        assert rank.linker.counters()["promises"] == 0


@pytest.mark.parametrize("page", [0, 2])
def test_a_promised_page_whose_bits_turned_over_fails_the_load(module: Any, daemon: Daemon, page: int) -> None:
    """Only then: the request is given up, and the page is not found again."""
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        (lease,) = rank.linker._promises.find("a").pools["kv"].leases
        offset = int(lease.hold.held_rows.offsets[page])
        lease.hold.session.arena.view()[offset + 7] ^= 1
        assert not rank.load("a", keys, range(8, 13))
        assert rank.linker.counters()["failed_load"] == 1
        found = rank.linker.lookup("b", [kv(keys)])
        assert found == list(range(1, page + 1))
        assert rank.load("b", keys[:page], range(8, 8 + page)) if found else True
    assert daemon.stats()["leases"] == 0


@pytest.mark.parametrize("page", [0, PAGES - 1])
def test_a_promised_page_that_is_not_loaded_decides_nothing(module: Any, daemon: Daemon, page: int) -> None:
    """The ranks agreed on fewer pages: another page's bits turn over, and it is not even read."""
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        stored = rank.read(range(1, PAGES - 1))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        (lease,) = rank.linker._promises.find("a").pools["kv"].leases
        lease.hold.session.arena.view()[int(lease.hold.held_rows.offsets[page]) + 7] ^= 1
        assert rank.load("a", keys[1:-1], range(8, 6 + PAGES))
        assert _same(rank.read(range(8, 6 + PAGES)), stored)
        assert "kv.loads_checksum" not in rank.linker.counters()


def test_a_page_that_fails_keeps_no_other_from_being_waited_for(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        (lease,) = rank.linker._promises.find("a").pools["kv"].leases
        lease.hold.session.arena.view()[int(lease.hold.held_rows.offsets[2]) + 7] ^= 1
        assert rank.linker.load("a", [kv(keys, rank.slots(range(8, 13)))])
        index = rank.linker.start_layer_wise_loading()
        counter = rank.linker.layer_done_counter
        (started,), _ = counter._running[index]
        asked: list[int] = []
        wait = started.load.wait_layer

        def noted(layer: int) -> bool:
            asked.append(layer)
            return bool(wait(layer))

        started.load.wait_layer = noted
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            assert asked == list(range(2 * (layer + 1))), "its keys and its values"
            good = [0, 1, 3, 4]
            for buffer in (rank.pool.k_buffer[layer], rank.pool.v_buffer[layer]):
                for at in good:
                    assert torch.equal(buffer[rank.slots(range(8 + at, 9 + at))], buffer[rank.slots(range(at, at + 1))])
        assert not rank.linker.finish_layer_wise_loading(index)


def test_a_wait_that_breaks_fails_its_batch(module: Any, daemon: Daemon) -> None:
    """Also a batch that does not run, and pages that are named twice, which have one place."""
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        assert not rank.linker.finish_layer_wise_loading(0)
        assert not rank.linker.finish_layer_wise_loading(-1)
        assert rank.offload(keys, range(PAGES))
        assert rank.linker.lookup("a", [kv([*keys, keys[0]])]) == []
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        assert not rank.linker.load("a", [kv([keys[0], keys[0]], rank.slots(range(8, 10)))])
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        assert rank.linker.load("a", [kv(keys, rank.slots(range(8, 13)))])
        index = rank.linker.start_layer_wise_loading()
        counter = rank.linker.layer_done_counter
        (started,), _ = counter._running[index]
        started.load.wait_layer = None
        counter.set_consumer(index)
        counter.wait_until(0)
        assert not rank.linker.finish_layer_wise_loading(index)


def test_offloads_end_in_order_and_always(module: Any, daemon: Daemon) -> None:
    with Rank(module, daemon.socket) as rank:
        late = linked.Event()
        late.has_come = False
        rank.linker.events = [late]
        keys = page_keys(1, 3)
        assert rank.linker.offload([kv(keys, rank.slots(range(3)))])
        rank.linker.events = [linked.Event()]
        assert rank.linker.offload([kv(page_keys(2, 1), rank.slots(range(3, 4)))])
        assert rank.linker.offload([kv(page_keys(3, 1), torch.tensor([1, 2, 3, 4]))]), "no whole page"
        assert not rank.linker.offload([])
        assert rank.linker.num_completed_offloads() == 0
        late.has_come = True
        wait_until(lambda: rank.linker.num_completed_offloads() == 3, "all have ended")
        assert [rank.linker.pop_completed_offload() for _ in range(3)] == [True, True, False]
        late.has_come = False
        rank.linker.events = [late]
        assert rank.linker.offload([kv(keys, rank.slots(range(3)))])
        rank.linker.reset()
        assert rank.linker.num_completed_offloads() == 0
        late.has_come = True
        rank.wait_connected()
        assert rank.offload(page_keys(4, 1), range(1)), "what was withdrawn is not reported any more"


def test_a_full_line_and_a_daemon_that_is_away_store_nothing(
    module: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.sglang.offloads.OFFLOADS_MAX", 1)
    with Rank(module, daemon.socket) as rank:
        late = linked.Event()
        late.has_come = False
        rank.linker.events = [late]
        assert rank.linker.offload([kv(page_keys(1, 1), rank.slots(range(1)))])
        assert rank.linker.offload([kv(page_keys(2, 1), rank.slots(range(1)))])
        assert rank.linker.counters()["refused_offloads"] == 1
        daemon.kill()
        wait_until(lambda: rank.linker.counters()["kv.connected"] == 0, "the client knows")
        late.has_come = True
        wait_until(lambda: rank.linker.num_completed_offloads() == 2, "both have ended")
        assert [rank.linker.pop_completed_offload() for _ in range(2)] == [False, False]
        assert rank.linker.lookup("a", [kv(page_keys(1, 1))]) == []


def test_behind_a_reset_nothing_is_found_unless_updates_are_named(module: Any, daemon: Daemon) -> None:
    """A reset may be behind an update that showed nothing: one whose flush was refused, or between begin and end alone."""
    with Rank(module, daemon.socket) as alone, Rank(module, daemon.socket, updates_are_named=True) as named:
        keys = page_keys(1, PAGES)
        assert alone.offload(keys, range(PAGES))
        alone.flush_cache()
        assert alone.linker.lookup("a", [kv(keys)]) == []
        assert alone.offload(keys, range(PAGES))
        assert alone.linker.lookup("a", [kv(keys)])[-1] == PAGES
        alone.flush_cache()
        assert alone.linker.lookup("a", [kv(keys)]) == []

        named.flush_cache()
        assert named.linker.lookup("a", [kv(keys)])[-1] == PAGES, "the same weights"

        def flush_cache_after_weight_update() -> None:
            named.flush_cache()

        flush_cache_after_weight_update()
        assert named.linker.lookup("a", [kv(keys)]) == [], "an update without a version"
        assert named.offload(keys, range(PAGES))
        named.flush_cache()
        assert named.linker.lookup("a", [kv(keys)]) == [], "others may be without, too"


def test_ranks_of_an_engine_have_its_own_name_together(
    module: Any, daemon: Daemon, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they have come as far: what one has stored behind a further reset, the other one does not find."""
    monkeypatch.setattr(module, "_drawn_word", lambda *_: "drawn")
    keys, later = page_keys(1, PAGES), page_keys(2, 1)
    with Rank(module, daemon.socket) as first, Rank(module, daemon.socket) as second:
        first.flush_cache()
        second.flush_cache()
        assert first.offload(keys, range(PAGES))
        assert second.linker.lookup("a", [kv(keys)])[-1] == PAGES
        first.flush_cache()
        assert first.offload(later, range(1))
        assert second.linker.lookup("b", [kv(later)]) == [], "of a reset that is still before it"
        assert second.linker.lookup("a", [kv(keys)])[-1] == PAGES
        second.flush_cache()
        assert second.linker.lookup("b", [kv(later)]) == [1]
        assert second.linker.lookup("a", [kv(keys)]) == []
        weights.weight_version = "second"
        assert [rank.linker.lookup("c", [kv(later)]) for rank in (first, second)] == [[], []]
        for rank in (first, second):
            rank.wait_connected()
        assert first.offload(keys, range(PAGES))
        assert second.linker.lookup("d", [kv(keys)])[-1] == PAGES
        weights.weight_version = "third"
        assert second.linker.lookup("d", [kv(keys)]) == []


@pytest.mark.parametrize("are_named", [False, True])
@pytest.mark.parametrize("call", ["lookup", "load", "offload"])
def test_a_version_that_changes_is_seen_in_every_call(
    module: Any, daemon: Daemon, weights: Any, call: str, *, are_named: bool
) -> None:
    """An update that does not flush: KV of the old weights is neither found nor loaded, and the new ones' is this engine's."""
    with (
        Rank(module, daemon.socket, updates_are_named=are_named) as rank,
        Rank(module, daemon.socket, updates_are_named=are_named) as other,
    ):
        keys, later = page_keys(1, PAGES), page_keys(2, 1)
        assert rank.offload(keys, range(PAGES))
        assert other.linker.lookup("o", [kv(keys)])[-1] == PAGES
        assert rank.linker.lookup("a", [kv(keys)])[-1] == PAGES
        weights.weight_version = "second"
        if call == "lookup":
            assert rank.linker.lookup("b", [kv(keys)]) == []
        elif call == "load":
            assert not rank.linker.load("a", [kv(keys, rank.slots(range(8, 13)))])
        else:
            rank.offload(later, range(1))
        assert rank.linker.counters()["promises"] == 0
        rank.wait_connected()
        assert rank.offload(later, range(1))
        assert rank.linker.lookup("c", [kv([*later, *keys])]) == [1]
        weights.weight_version = "first"
        assert other.linker.lookup("o", [kv(later)]) == [], "computed by who knows which weights"
        assert other.linker.lookup("o", [kv(keys)])[-1] == PAGES


def test_an_offload_under_way_keeps_the_name_it_was_asked_under(module: Any, daemon: Daemon, weights: Any) -> None:
    with Rank(module, daemon.socket) as rank:
        keys, late = page_keys(1, 1), linked.Event()
        late.has_come = False
        rank.linker.events = [late]
        assert rank.linker.offload([kv(keys, rank.slots(range(1)))])
        weights.weight_version = "second"
        assert rank.linker.lookup("a", [kv(keys)]) == []
        rank.wait_connected()
        late.has_come = True
        wait_until(lambda: rank.linker.num_completed_offloads() == 1, "it has ended")
        assert not rank.linker.pop_completed_offload()
        assert rank.linker.lookup("a", [kv(keys)]) == []
        assert rank.offload(keys, range(1))
        assert rank.linker.lookup("a", [kv(keys)]) == [1]


@pytest.mark.parametrize("are_named", [False, True])
def test_engines_share_a_version_only_where_versions_are_names(
    module: Any, daemon: Daemon, weights: Any, are_named: bool
) -> None:
    """Two runs both call their first update "1": only their operator knows whether those are the same weights."""
    keys = page_keys(1, PAGES)
    for found in ([], list(range(1, PAGES + 1)) if are_named else []):
        weights.weight_version = "first"
        with Rank(module, daemon.socket, updates_are_named=are_named) as rank:
            weights.weight_version = "1"
            rank.flush_cache()
            assert rank.linker.lookup("a", [kv(keys)]) == found
            assert rank.offload(keys, range(PAGES))
            weights.weight_version = "2"
            assert rank.linker.lookup("a", [kv(keys)]) == [], "its flush was refused"
            rank.flush_cache()
            assert rank.linker.lookup("a", [kv(keys)]) == []


def test_two_ranks_answer_for_themselves(module: Any, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one lacks the last page: SGLang intersects, and both can load what is left."""
    from kvpool_client.sglang.host_pages import Shard

    ranks = []
    for number in range(2):
        monkeypatch.setattr(module, "_shard_of", lambda params, number=number: Shard(tp_rank=number, tp_size=2))
        ranks.append(Rank(module, daemon.socket))
    keys = page_keys(1, PAGES)
    for number, rank in enumerate(ranks):
        rank.fill(number, range(PAGES))
        assert rank.offload(keys[: PAGES - number], range(PAGES - number))
    found = [set(rank.linker.lookup("a", [kv(keys)])) for rank in ranks]
    agreed = max(found[0] & found[1])
    assert agreed == PAGES - 1
    for rank in ranks:
        assert rank.load("a", keys[:agreed], range(8, 8 + agreed))
        assert _same(rank.read(range(8, 8 + agreed)), rank.read(range(agreed)))
        assert rank.linker.load("b", [kv(keys, rank.slots(range(PAGES)))]), "the other rank counts on it"
    index = ranks[1].linker.start_layer_wise_loading()
    assert not ranks[1].linker.finish_layer_wise_loading(index)
    for rank in ranks:
        rank.linker.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pp_size": 2}, "refused_pp"),
        ({"sidecar_draft_device_pools": (object(),)}, "refused_layout"),
        ({"page_size": 8}, "refused_layout"),
    ],
)
def test_models_that_are_not_described_share_nothing(
    module: Any, daemon: Daemon, change: dict[str, Any], reason: str
) -> None:
    config = {"socket": daemon.socket, "revision": "1"}
    params = params_of(MHATokenToKVPool(torch), **change)
    linker = module.KVPoolLinker(SimpleNamespace(model_path="tiny"), params, extra_config=config)
    assert linker.lookup("a", [kv(page_keys(1, 2))]) == []
    assert linker.offload([kv(page_keys(1, 2), torch.arange(2 * PAGE))])
    assert (linker.num_completed_offloads(), linker.pop_completed_offload()) == (1, False)
    assert linker.counters()[f"kv.{reason}"] == 2
    linker.close()


def test_pages_in_the_lower_tier_are_fetched_up_and_found_next_time(
    module: Any, start_daemon: Any, tmp_path: Any
) -> None:
    daemon = start_daemon(**{"ssd.path": str(tmp_path / "ssd"), "ssd.capacity": "64MiB"})
    with Rank(module, daemon.socket) as rank:
        keys = page_keys(1, PAGES)
        rank.fill(1, range(PAGES))
        assert rank.offload(keys, range(PAGES))
        daemon.stop()
        daemon.start()
        wait_until(lambda: rank.linker.counters()["kv.connected"] == 1, "connected again")
        wait_until(lambda: 2 in rank.linker._stores["kv"].levels(keys, is_counted=False), "on the SSD")
        first = rank.linker.lookup("a", [kv(keys)])
        assert first == list(range(1, len(first) + 1)), "as many as were fetched up meanwhile"
        wait_until(lambda: rank.linker.lookup("a", [kv(keys)]) == [1, 2, 3, 4, 5], "in DRAM")
        assert rank.load("a", keys, range(8, 13))
        assert _same(rank.read(range(8, 13)), rank.read(range(PAGES)))


def test_windows_and_states_bound_the_prefixes(module: Any, daemon: Daemon) -> None:
    """A window is there at the ends of nodes alone, and a state at its end; each pool has its own slots."""
    full, swa = MHATokenToKVPool(torch, layers=1), MHATokenToKVPool(torch, layers=2)
    temporal, conv = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 6, 3, dtype=torch.bfloat16)
    states = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=temporal, conv=[conv]))
    counters: list[Any] = []
    requests = SimpleNamespace(
        mamba_pool=states, mamba_map={3: 0}, register_layer_transfer_counter=lambda counter: counters.append(counter)
    )
    mapping = {0: (0, True), 1: (0, False), 2: (1, True)}
    cache = SimpleNamespace(
        full_kv_pool=full, swa_kv_pool=swa, layers_mapping=mapping, start_layer=0, mamba_pool=states
    )
    linker = module.KVPoolLinker(
        SimpleNamespace(model_path="hybrid"),
        params_of(cache, req_to_token_pool=requests),
        extra_config={"socket": daemon.socket, "revision": "1", "timeout_s": 10.0},
    )
    wait_until(lambda: all(linker.counters()[f"{name}.connected"] == 1 for name in ("kv", "swa", "mamba")), "connected")
    assert counters == [linker.layer_done_counter]
    keys = page_keys(1, 6)
    for number, buffer in enumerate([*full.k_buffer, *full.v_buffer, *swa.k_buffer, *swa.v_buffer, temporal, conv]):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(number)).to(buffer.dtype))
    before = [conv[0, 3].clone(), temporal[0, 3].clone(), swa.v_buffer[1][Rank.slots(range(2, 4))].clone()]
    for first, end, state in ((0, 4, 3), (4, 6, 5)):
        node = range(first, end)
        transfers = [
            kv(keys[first:end], Rank.slots(node)),
            linked.window(PoolName.SWA, keys[end - 2 : end], Rank.slots(range(end - 2, end))),
            linked.window(PoolName.MAMBA, keys[end - 1 : end], torch.tensor([state])),
        ]
        assert linker.offload(transfers)
    wait_until(lambda: linker.num_completed_offloads() == 2, "both nodes are offloaded")
    assert [linker.pop_completed_offload() for _ in range(2)] == [True, True]
    asked = [
        kv(keys),
        linked.window(PoolName.SWA, keys[-2:]),
        linked.window(PoolName.MAMBA, keys[-1:]),
    ]
    assert linker.lookup("a", asked) == [4, 6]
    loads = [
        kv(keys[:4], Rank.slots(range(8, 12))),
        linked.window(PoolName.SWA, keys[2:4], Rank.slots(range(10, 12))),
        linked.window(PoolName.MAMBA, keys[3:4], torch.tensor([1])),
    ]
    assert linker.load("a", loads)
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(4):
        linker.layer_done_counter.wait_until(layer)
    assert linker.finish_layer_wise_loading(index)
    after = [conv[0, 1], temporal[0, 1], swa.v_buffer[1][Rank.slots(range(10, 12))]]
    assert _same(before, after)
    linker.close()
