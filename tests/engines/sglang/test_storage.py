"""SGLang's storage backend over a real daemon, driven as HiCache's controller drives it (see sglang_standin)."""

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool_client.sglang import Settings, Shard, describe_host_pool
from tests.engines.conftest import TIMEOUT_S
from tests.engines.sglang.standin import Controller, HostPool, Injector, PoolTransfer, page_keys
from tests.rigs.daemon import Daemon, in_both_write_modes, wait_until

DOCUMENT = Path(__file__).parents[3] / "docs" / "engines.md"
Start = Callable[..., Controller]


@pytest.fixture
def start(start_sglang: Start) -> Start:
    """Makes a backend as SGLang's factory does, registers a pool and hands both to a controller."""
    return start_sglang


def _backed_up(controller: Controller, keys: list[str], first: int = 0, rank: int = 0) -> None:
    for number, key in enumerate(keys, first):
        controller.pool.fill(number, key, rank)
    assert controller.backup(keys, range(first, first + len(keys))) == len(keys)


def _fetched(controller: Controller, keys: list[str], rank: int = 0) -> int:
    """Loads pages into other pages than they were stored from; checks each of them."""
    pages = list(reversed(range(len(keys))))
    controller.pool.kv_buffer[...] = 0
    got = controller.prefetch(keys, pages)
    for number in range(got):
        assert controller.pool.holds(pages[number], keys[number], rank), f"page {number}"
    return got


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "mla"])
def test_a_second_engine_gets_the_pages_of_the_first(shared_daemon: Daemon, start: Start, layout: str) -> None:
    first = start(shared_daemon, HostPool(layout=layout))
    keys = page_keys(1, 9)
    assert _fetched(first, keys) == 0
    _backed_up(first, keys)
    second = start(shared_daemon, HostPool(layout=layout, pages=20))
    assert _fetched(second, keys) == 9
    assert second.backend.counters()["loaded_pages"] == 9
    assert first.backend.counters()["saved_pages"] == 9
    wait_until(lambda: shared_daemon.stats()["leases"] == 0, "the leases have ended")
    assert shared_daemon.problems() == []


def test_pages_that_are_looked_up_and_then_loaded_count_once(daemon: Daemon, start: Start) -> None:
    controller, keys = start(daemon), page_keys(12, 9)
    assert _fetched(controller, keys) == 0
    wait_until(lambda: daemon.stats()["usage.lookup_tokens"] > 0, "the first page is counted as a miss")
    before = daemon.stats()
    _backed_up(controller, keys)
    assert _fetched(controller, keys) == 9
    wait_until(lambda: daemon.stats()["usage.loads"] > 0, "what was loaded is counted")
    tokens = controller.pool.page_size * 9
    after = daemon.stats()
    found = [after[name] - before[name] for name in ("usage.lookup_tokens", "usage.hit_tokens", "usage.loaded_tokens")]
    assert found == [tokens] * 3


def test_a_batch_in_the_middle_of_a_prompt_needs_nothing_before_it(shared_daemon: Daemon, start: Start) -> None:
    first, keys = start(shared_daemon), page_keys(2, 10)
    _backed_up(first, keys[:6])
    for number, key in enumerate(keys[6:], 6):
        first.pool.fill(number, key)
    assert first.backup(keys[6:], range(6, 10), prefix=keys[:6]) == 4
    second = start(shared_daemon)
    assert _fetched(second, keys[3:]) == 7
    assert _fetched(second, keys) == 10


@in_both_write_modes
def test_a_partly_stored_prompt_is_found_up_to_its_hole(daemon: Daemon, start: Start) -> None:
    controller, keys = start(daemon), page_keys(3, 8)
    _backed_up(controller, keys[:5])
    _backed_up(controller, keys[6:], first=6)
    assert _fetched(controller, keys) == 5
    assert controller.backend.exists(keys[7])
    assert not controller.backend.exists(keys[5])


def test_more_pages_than_a_batch_holds_come_in_order(start_daemon: Callable[..., Daemon], start: Start) -> None:
    daemon = start_daemon(dram__capacity="64MiB")
    controller = start(daemon, HostPool(pages=120))
    keys = page_keys(4, 110)
    _backed_up(controller, keys)
    assert _fetched(controller, keys) == 110


@pytest.mark.parametrize("is_fetched", [False, True])
def test_eviction_takes_a_batch_from_its_end(
    start_daemon: Callable[..., Daemon], start: Start, is_fetched: bool
) -> None:
    controller = start(start_daemon(), HostPool(pages=44, page_size=16, layer_num=32, heads=32))
    keys = page_keys(5, 44)
    for number, key in enumerate(keys):
        controller.pool.fill(number, key)
    controller.backup(keys[:22], range(22))
    if is_fetched:
        assert controller.prefetch(keys[:22], range(22)) == 22
    controller.backup(keys[22:], range(22, 44))
    present = [controller.backend.exists(key) for key in keys]
    assert 22 <= sum(present) < 44
    assert present[:22] == sorted(present[:22], reverse=True)
    assert all(present[22:])


def test_a_flipped_bit_ends_the_run_before_its_page(shared_daemon: Daemon, start: Start) -> None:
    controller, keys = start(shared_daemon), page_keys(6, 6)
    _backed_up(controller, keys)
    pages = describe_host_pool(controller.pool, Shard())[0]
    with shared_daemon.connect(pages.layout, model=controller.backend._store.model, timeout_s=TIMEOUT_S) as pool:
        wait_until(lambda: pool.connected, "connected")
        chain = pool.keys_from_hashes([bytes.fromhex(keys[3])], block_tokens=4)
        with pool.acquire(pool.lookup(chain)) as lease:
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[int(lease.hold.rows.offsets[0]) + 17] ^= 4
    assert _fetched(controller, keys) == 3
    assert controller.backend.batch_exists(keys) == 3
    _backed_up(controller, keys)
    assert _fetched(controller, keys) == 6


def test_without_a_daemon_everything_is_a_miss_until_it_comes(
    start_daemon: Callable[..., Daemon], start: Start
) -> None:
    daemon = start_daemon()
    daemon.kill()
    controller, keys = start(daemon, waits=False), page_keys(7, 4)
    assert controller.backup(keys, range(4)) == 0
    assert _fetched(controller, keys) == 0
    daemon.start()
    wait_until(lambda: controller.backend.counters()["connected"] == 1, "reconnected")
    _backed_up(controller, keys)
    assert _fetched(controller, keys) == 4


def test_a_daemon_killed_during_use_costs_the_pages_and_nothing_else(daemon: Daemon, start: Start) -> None:
    controller, keys = start(daemon, extra={"timeout_s": 10.0}), page_keys(8, 5)
    _backed_up(controller, keys)
    hits = controller.backend.batch_exists(keys)
    daemon.kill()
    assert hits == 5
    results = controller.backend.batch_get_v1(keys, controller.pool.slots(range(5)))
    assert results == sorted(results, reverse=True)
    assert all(controller.pool.holds(number, keys[number]) for number in range(sum(results)))
    assert controller.backend.batch_set_v1(keys, controller.pool.slots(range(5))) == [False] * 5
    assert controller.backend.clear() is False


def test_pages_on_ssd_come_back_after_a_restart(
    start_daemon: Callable[..., Daemon], start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    controller, keys = start(daemon), page_keys(17, 5)
    _backed_up(controller, keys)
    assert daemon.stop() == 0
    daemon.start()
    wait_until(lambda: controller.backend.batch_exists(keys) == 5, "the pages are found again")
    assert daemon.stats()["dram.chunks"] == 0
    assert _fetched(controller, keys) == 5


def test_a_hung_daemon_costs_a_bounded_time(daemon: Daemon, start: Start) -> None:
    controller, keys = start(daemon, extra={"timeout_s": 0.5}), page_keys(9, 4)
    for number, key in enumerate(keys):
        controller.pool.fill(number, key)
    controller.backup(keys, range(4))  # what is late before the daemon hangs is stored at the end
    daemon.signal(signal.SIGSTOP)
    try:
        assert controller.backend.batch_get_v1(keys, controller.pool.slots(range(4))) == [False] * 4
        assert not controller.backend.counters()["connected"]
    finally:
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: controller.backup(keys, range(4)) == 4, "the pages are stored")
    wait_until(lambda: _fetched(controller, keys) == 4, "the pages are fetched")


def test_two_salts_and_two_models_never_share(shared_daemon: Daemon, start: Start) -> None:
    controller = start(shared_daemon)
    _backed_up(controller, page_keys(10, 3, salt="tenant-a"))
    assert controller.backend.batch_exists(page_keys(10, 3, salt="tenant-b")) == 0
    assert controller.backend.batch_exists(page_keys(10, 3)) == 0
    keys = page_keys(10, 3, salt="tenant-a")
    assert controller.backend.batch_exists(keys) == 3
    others: list[dict[str, Any]] = [
        {"extra": {"salt": "other"}},
        {"extra": {"revision": "2"}},
        {"model_name": "tiny-2"},
    ]
    for fields in [*others, {"pp_size": 2}, {"attn_cp_size": 2}, {"tp_size": 2}]:
        assert start(shared_daemon, **fields).backend.batch_exists(keys) == 0, fields
    assert start(shared_daemon, HostPool(layout="layer_first")).backend.batch_exists(keys) == 0
    assert start(shared_daemon).backend.batch_exists(keys) == 3


def test_each_rank_keeps_its_own_shard(shared_daemon: Daemon, start: Start) -> None:
    ranks = [start(shared_daemon, tp_rank=rank, tp_size=2) for rank in range(2)]
    keys = page_keys(11, 4)
    _backed_up(ranks[0], keys, rank=0)
    assert ranks[1].backend.batch_exists(keys) == 0
    _backed_up(ranks[1], keys[:3], rank=1)
    assert [_fetched(controller, keys, rank) for rank, controller in enumerate(ranks)] == [4, 3]


def test_replicated_kv_is_stored_once_and_read_by_all(shared_daemon: Daemon, start: Start) -> None:
    ranks = [
        start(shared_daemon, HostPool(layout="mla"), tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)
    ]
    keys = page_keys(12, 4)
    assert ranks[1].backup(keys, range(4)) == 4
    assert ranks[1].backend.batch_exists(keys) == 0
    _backed_up(ranks[0], keys)
    assert [_fetched(controller, keys) for controller in ranks] == [4, 4]


def test_injected_failures_never_bring_other_bytes(shared_daemon: Daemon, start: Start, seed: int) -> None:
    controller = start(shared_daemon)
    controller.backend = Injector(controller.backend, failure=0.3, seed=seed)
    fetched = 0
    for turn in range(40):
        keys = page_keys(100 + turn % 7, 8)
        for number, key in enumerate(keys):
            controller.pool.fill(number, key)
        controller.backup(keys, range(8))
        fetched += _fetched(controller, keys)
    assert fetched > 0


def test_the_second_form_of_the_verbs_serves_the_kv_too(shared_daemon: Daemon, start: Start) -> None:
    controller, keys = start(shared_daemon), page_keys(13, 3)
    slots = controller.pool.slots(range(3))
    for number, key in enumerate(keys):
        controller.pool.fill(number, key)
    assert controller.backend.batch_set_v2([PoolTransfer("kv", slots, keys=keys)]) == {"kv": [True] * 3}
    assert controller.backend.batch_exists_v2(keys).kv_hit_pages == 3
    assert controller.backend.batch_get_v2([PoolTransfer("kv", slots, keys=keys)]) == {"kv": [True] * 3}
    assert controller.backend.batch_get_v2([PoolTransfer("kv", None, keys=keys)]) == {"kv": [False] * 3}
    assert controller.backend.batch_get_v2([PoolTransfer("kv", slots, keys=None)]) == {"kv": []}
    controller.backend.register_mem_host_pool_v2(controller.pool, "kv")
    assert controller.backend.batch_exists(keys) == 3


def test_clear_drops_this_model_and_no_other(shared_daemon: Daemon, start: Start) -> None:
    mine, other = start(shared_daemon), start(shared_daemon, model_name="another")
    keys = page_keys(14, 3)
    _backed_up(mine, keys)
    _backed_up(other, keys)
    assert mine.backend.clear() is True
    assert mine.backend.batch_exists(keys) == 0
    assert other.backend.batch_exists(keys) == 3


def test_a_page_that_does_not_fit_is_a_miss_and_logged_once(
    shared_daemon: Daemon, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    controller, keys = start(shared_daemon), page_keys(15, 2)
    with caplog.at_level(logging.WARNING):
        for wrong in (np.arange(7), np.arange(1, 9), np.array([0, 1, 2, 3, 5, 4, 6, 7])):
            assert controller.backend.batch_get_v1(keys, wrong) == [False] * 2
            assert controller.backend.batch_set_v1(keys, wrong) == [False] * 2
        assert controller.backend.batch_exists(["no hash"]) == 0
        assert controller.backend.get("k") is None
        assert controller.backend.batch_get(["k", "l"]) == [None, None]
        assert controller.backend.set("k", b"v") is False
    assert controller.backend.counters()["failed_batch_get"] == 4
    assert len([record for record in caplog.records if "batch_get missed" in record.message]) == 1


class _Unruly(HostPool):
    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        return [address + int(indices[0] == self.page_size) for address in addresses], sizes


def test_a_host_pool_that_cannot_be_described_leaves_misses(shared_daemon: Daemon, start: Start) -> None:
    controller, keys = start(shared_daemon, _Unruly(), waits=False), page_keys(16, 2)
    assert controller.backend.counters()["failed_register"] == 1
    assert controller.backup(keys, range(2)) == 0
    assert controller.backend.batch_exists(keys) == 0


def _retain(*directives: dict[str, Any]) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    envelope = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [{**action, "payload": {"directives": directives}}],
    }
    return {"kv_hints": envelope}


@pytest.mark.parametrize(
    ("prefix", "directive", "kept"),
    [
        (None, {"priority": 80}, 6),  # the whole prompt: wherever the batch begins
        (None, {"end": 16, "priority": 80}, 0),  # pages without known keys
        (0, {"end": 2.5, "priority": 80}, 3),
        (2, {"end": 2.5, "priority": 80}, 1),
        (2, {"start": 4, "priority": 80}, 4),
        (9, {"end": 2.5, "priority": 80}, 0),
    ],
)
def test_hints_of_a_request_apply_to_its_pages(
    shared_daemon: Daemon, start: Start, prefix: int | None, directive: dict[str, Any], kept: int
) -> None:
    controller = start(shared_daemon)
    tokens = controller.pool.page_size
    in_tokens = {name: value if name == "priority" else int(value * tokens) for name, value in directive.items()}
    keys, kept_before = page_keys(3, 6), shared_daemon.stats()["dram.retained_chunks"]
    before = None if prefix is None else page_keys(5, prefix) if prefix else []
    assert controller.backup(keys, range(6), before, _retain(in_tokens)) == 6
    assert shared_daemon.stats()["dram.retained_chunks"] - kept_before == kept
    assert controller.backend.counters()["clipped_pages"] == 0


def test_pages_without_hints_have_the_configured_priority(shared_daemon: Daemon, start: Start) -> None:
    controller, before = start(shared_daemon, extra={"priority": 50}), shared_daemon.stats()["dram.retained_chunks"]
    _backed_up(controller, page_keys(3, 4))
    assert shared_daemon.stats()["dram.retained_chunks"] - before == 4
    assert controller.backup(page_keys(4, 2), range(2), None, _retain({"priority": 10})) == 2
    assert shared_daemon.stats()["dram.retained_chunks"] - before == 4


@pytest.mark.parametrize("given", ["{", {"actions": 5}, _retain({"priority": 999})["kv_hints"]])
def test_bad_hints_are_counted_and_do_not_stop_the_save(shared_daemon: Daemon, start: Start, given: Any) -> None:
    controller, keys = start(shared_daemon), page_keys(3, 4)
    assert controller.backup(keys, range(4), None, {"kv_hints": given}) == 4
    assert controller.backend.counters()["failed_kv_hints"] == 1
    assert controller.backup(keys, range(4), None, {"other": 1}) == 4


def test_slots_before_the_first_page_are_a_miss(shared_daemon: Daemon, start: Start) -> None:
    controller, keys = start(shared_daemon), page_keys(13, 1)
    _backed_up(controller, keys)
    before = [slot - controller.pool.page_size for slot in controller.pool.slots([0])]
    assert controller.backend.batch_get_v1(keys, np.array(before)) == [False]
    assert controller.backend.batch_set_v1(page_keys(14, 1), np.array(before)) == [False]


def test_the_package_imports_no_engine() -> None:
    code = "import sys, kvpool_client.sglang; print('torch' in sys.modules, 'sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_configuration_in_the_document_is_accepted() -> None:
    text = re.search(r"--hicache-storage-backend-extra-config\s+'(\{.*?\})'", DOCUMENT.read_text(), re.DOTALL)
    assert text is not None
    extra = json.loads(text[1].replace("\\\n", " "))
    assert (extra["module_path"], extra["class_name"]) == ("kvpool_client.sglang", "KVPoolStorage")
    assert Settings.read(extra, "tiny").socket == "/run/kvpool/kvpool.sock"
