"""Metrics of a real daemon: reasons that `test_counts_of_a_run.py` does not meet, and what reports and scrapes may do."""

import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvpool_client as kv
from kvpool.protocol import usage
from kvpool.protocol.records import messages as m
from tests.rigs.daemon import SMALL, Daemon, Start, wait_connected, wait_until
from tests.rigs.metrics import METERED, get, samples_of, wait_sample
from tests.rigs.payload import load_all, payload_of, store, tokens_of

CAPACITY = f"{24 * SMALL.chunk_bytes}B"
LARGE = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=128)


@pytest.fixture
def metered(start_daemon: Start) -> Start:
    """Starts daemons with metrics."""
    return lambda **options: start_daemon(**{**METERED, **options})


def test_reports_come_at_most_once_a_second(metered: Start) -> None:
    daemon = metered()
    started = time.monotonic()
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        store(pool, keys)

        def has_reported_twice() -> bool:
            load_all(pool, keys)  # its lease wakes the thread that reports
            select.select([], [], [], 0.05)
            return samples_of(daemon)["kvpool_usage_reports_total"] >= 2

        wait_until(has_reported_twice, "a second report")
    assert time.monotonic() - started > 0.9


def test_an_eviction_for_another_size_and_one_of_a_full_index_are_reasons_of_their_own(metered: Start) -> None:
    daemon = metered(dram__capacity=CAPACITY)
    with daemon.connect() as pool, daemon.connect(layout=LARGE) as other:
        wait_until(lambda: not daemon.info()["dram_is_settling"], "all of the arena can be handed out")
        for number in range(3):
            assert store(pool, pool.keys(tokens_of(number, 8 * 32))).stored == 8
        assert store(other, other.keys(tokens_of(9, 128))).stored == 1
    found, stats = samples_of(daemon), daemon.stats()
    assert found['kvpool_dram_removed_chunks_total{reason="other_class"}'] == stats["evicted_chunks"] > 0
    assert stats["dram.evicted_other_class"] == stats["evicted_chunks"]
    assert found['kvpool_slots{size_class="12288x3",state="used"}'] == stats["dram.chunks"] - 1
    daemon = metered(dram__max_chunks="8")
    with daemon.connect() as pool:
        for number in range(3):
            store(pool, pool.keys(tokens_of(number, 4 * 32)))
    assert samples_of(daemon)['kvpool_dram_removed_chunks_total{reason="index_full"}'] == 4


def test_saves_without_a_daemon_are_reported_to_the_next_one(metered: Start) -> None:
    daemon = metered()
    with daemon.connect() as pool:
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client notices")
        assert store(pool, pool.keys(tokens_of(2, 3 * 32))).declined == 3
        daemon.start()
        wait_connected(pool)
        wait_sample(daemon, 'kvpool_declined_chunks_total{reason="disconnected"}', 3)


def test_a_late_save_is_counted_as_expired_once_whatever_its_engine_does_then(metered: Start) -> None:
    daemon = metered(server__reservation_ttl="200ms")
    with daemon.connect() as pool:
        late = [pool.keys(tokens_of(seed, 3 * 32)) for seed in (1, 2)]
        committed, aborted = (pool.save(keys, from_=payload_of(keys, SMALL)) for keys in late)
        found = wait_sample(daemon, 'kvpool_declined_chunks_total{reason="expired"}', 2 * 3)
        assert (found["kvpool_expired_reservations_total"], found["kvpool_aborted_chunks_total"]) == (2, 2 * 3)
        assert (found["kvpool_reservations"], found["kvpool_zombie_slots"]) == (0, 0)
        assert dict(committed.commit().reasons) == {"expired": 3}
        aborted.abort()
        assert dict(aborted.wait().reasons) == {"expired": 3}
    wait_until(lambda: daemon.stats()["connections"] == 1, "the last report has come")
    found = samples_of(daemon)
    assert found['kvpool_declined_chunks_total{reason="expired"}'] == 2 * 3
    assert found['kvpool_declined_chunks_total{reason="aborted"}'] == 0


def test_a_hostile_report_is_cut_and_counted(metered: Start) -> None:
    daemon = metered()
    with daemon.connect(model="liar") as pool:
        session = pool._link.session
        assert session is not None
        for _ in range(3):
            assert session.notify(m.Usage(b"\xff" * 8 * usage.COUNTS))
        found = wait_sample(daemon, "kvpool_usage_reports_total", 3)
        assert found["kvpool_usage_clamped_values_total"] > 0
        hit = sum(value for name, value in found.items() if name.startswith("kvpool_hit_tokens_total"))
        assert hit == found['kvpool_lookup_tokens_total{model="liar"}']
        part_of = {"recalled_blocks": "middle_blocks", "dense_kv_heads": "kv_heads", "kept_mass": "query_heads"}
        for names in part_of.items():
            part, whole = (found[f'kvpool_sparse_{name}_total{{model="liar"}}'] for name in names)
            assert 0 < part <= whole
        assert session.notify(m.Usage(b"short"))
        wait_until(lambda: daemon.stats()["protocol_errors"] == 1, "a column of another length ends the connection")
    assert daemon.problems() == []


def test_a_port_in_use_refuses_the_start_by_name(metered: Start) -> None:
    taken = metered().info()["metrics"]
    with pytest.raises(AssertionError, match=f"server.metrics {taken} cannot be bound"):
        metered(server__metrics=taken)


def test_not_ready_while_draining(metered: Start) -> None:
    daemon = metered(server__stop_timeout="600s")
    with daemon.connect() as pool, daemon.admin() as admin:
        address = admin.info()["metrics"]
        keys = pool.keys(tokens_of(1, 3 * 32))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: get(address, "/readyz")[0] == 503, "draining shows")
        assert get(address, "/healthz")[0] == 200
        assert save.commit().stored == 3
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 0


def test_scrapes_under_load_are_each_of_one_moment(metered: Start) -> None:
    daemon = metered(dram__capacity=CAPACITY)
    is_over = threading.Event()

    def work(seed: int) -> int:
        rounds = 0
        with daemon.connect(model=f"m-{seed}") as pool:
            while not is_over.is_set():
                keys = pool.keys(tokens_of(seed * 1000 + rounds % 5, 6 * 32))
                store(pool, keys)
                load_all(pool, keys)
                rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as threads:
        workers = [threads.submit(work, seed) for seed in (1, 2)]
        try:
            for _ in range(15):
                now = samples_of(daemon)
                removed, saved = (
                    sum(value for name, value in now.items() if name.startswith(f"kvpool_{counter}_chunks_total"))
                    for counter in ("dram_removed", "saved")
                )
                assert saved == now["kvpool_chunks"] + removed
                assert now["kvpool_dram_used_bytes"] <= now["kvpool_dram_capacity_bytes"]
        finally:
            is_over.set()
        assert all(worker.result(60.0) > 0 for worker in workers)
    assert daemon.problems() == []


def test_a_connection_counts_once_and_an_uptime_begins_with_the_daemon(daemon: Daemon) -> None:
    accepted = [daemon.stats()["accepted_connections"] for _ in range(3)]
    assert accepted == [accepted[0], accepted[0] + 1, accepted[0] + 2], "each look is one connection"
    assert 0 < daemon.info()["uptime_s"] < time.monotonic(), "not with the machine"
