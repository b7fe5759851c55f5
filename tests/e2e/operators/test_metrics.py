"""Metrics of a real daemon: engines' work appears, reasons are counted separately, and no request over HTTP does harm."""

import contextlib
import json
import random
import select
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol import usage
from kvpool.protocol.records import messages as m
from kvpool.server.metrics.answers import SNAPSHOT_TIMEOUT_S
from kvpool.server.metrics.http import CONNECTIONS_MAX
from tests.rigs.daemon import SMALL, Daemon, spawn, wait_connected, wait_until
from tests.rigs.payload import load_all, payload_of, store, tokens_of

CHUNKS = 24
CAPACITY = f"{CHUNKS * SMALL.chunk_bytes}B"
LARGE = kv.Layout(layers=3, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=128)
ON = "127.0.0.1:0"

# A daemon whose control thread is blocked between two lines on its standard input.
STANDING_DAEMON = """
import asyncio, sys
from kvpool.config.config import load_config
from kvpool.server.app import App

def stand_still():
    sys.stdin.readline()
    print("standing", flush=True)
    sys.stdin.readline()

async def main():
    asyncio.get_running_loop().add_reader(sys.stdin, stand_still)
    await App(load_config(None, sys.argv[1:]), load_config).run()

asyncio.run(main())
"""


def _address(daemon: Daemon) -> str:
    with daemon.admin() as admin:
        return str(admin.info()["metrics"])


def _get(address: str, path: str = "/metrics", timeout_s: float = 60.0) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _metrics(address: str) -> dict[str, float]:
    status, text = _get(address)
    assert status == 200, text
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def _wait_for(address: str, name: str, value: float) -> dict[str, float]:
    wait_until(lambda: _metrics(address).get(name) == value, f"{name} is {value}")
    return _metrics(address)


@pytest.mark.slow
def test_hits_misses_loads_and_saves_of_a_client_appear(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    address = _address(daemon)
    with daemon.connect(model="m-1") as pool, daemon.connect(model="m-2") as other:
        keys = pool.keys(tokens_of(1, 6 * 32))
        assert pool.lookup(keys).chunks == 0
        store(pool, keys)
        longer = pool.keys(np.concatenate([tokens_of(1, 6 * 32), tokens_of(2, 2 * 32)]))
        assert load_all(pool, longer)[0].chunks == 6
        other.lookup(other.keys(tokens_of(3, 3 * 32)))
        found = _wait_for(address, 'kvpool_loads_total{model="m-1"}', 1)
        _wait_for(address, 'kvpool_lookups_total{model="m-2"}', 1)
    tokens, size = 32, SMALL.chunk_bytes
    for name, chunks in {
        'hit_{}_total{{model="m-1",tier="dram"}}': 6,
        'missed_{}_total{{model="m-1"}}': 6 + 2,
        'loaded_{}_total{{model="m-1",tier="dram"}}': 6,
        'saved_{}_total{{model="m-1"}}': 6,
    }.items():
        assert found[f"kvpool_{name.format('tokens')}"] == chunks * tokens, name
        assert found[f"kvpool_{name.format('bytes')}"] == chunks * size, name
    assert found["kvpool_reuse_gap_seconds_count"] == 6
    assert found['kvpool_request_duration_seconds_count{verb="acquire"}'] == 1
    assert found['kvpool_connections{role="engine"}'] == 2
    assert found["process_resident_memory_bytes"] > 1 << 20
    after = _wait_for(address, 'kvpool_connections{role="engine"}', 0)
    assert after['kvpool_missed_tokens_total{model="m-2"}'] == 3 * tokens
    assert daemon.stats()["usage.hit_tokens"] == 6 * tokens


def test_the_last_lookups_before_close_are_not_lost(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        for _ in range(100):
            pool.lookup(keys)
    _wait_for(_address(daemon), 'kvpool_lookups_total{model="test-model"}', 100)


def test_reports_come_at_most_once_a_second(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    address = _address(daemon)
    started = time.monotonic()
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        store(pool, keys)

        def has_reported_twice() -> bool:
            load_all(pool, keys)  # its lease wakes the thread that reports
            select.select([], [], [], 0.05)
            return _metrics(address)["kvpool_usage_reports_total"] >= 2

        wait_until(has_reported_twice, "a second report")
    assert time.monotonic() - started > 0.9


def test_evictions_and_removals_are_counted_separately(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", dram__capacity=CAPACITY)
    address = _address(daemon)
    with daemon.connect() as pool, daemon.connect(layout=LARGE) as other, daemon.admin() as admin:
        wait_until(lambda: not admin.info()["dram_is_settling"], "all of the arena can be handed out")
        for number in range(4):
            assert store(pool, pool.keys(tokens_of(number, 8 * 32))).stored == 8
        assert store(other, other.keys(tokens_of(9, 128))).stored == 1
        keys = pool.keys(tokens_of(3, 8 * 32))
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[int(lease.hold.rows.offsets[7])] ^= 1
            into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
            assert pool.load(lease, into=into).wait().reason == "checksum"
        wait_until(lambda: admin.stats()["index"]["leases"] == 0, "the lease has ended: nobody waits for that")
        flushed = admin.flush(None, None)["chunks"]
    found = _wait_for(address, 'kvpool_failed_loads_total{reason="checksum"}', 1)
    removed = {
        reason: found[f'kvpool_dram_removed_chunks_total{{reason="{reason}"}}']
        for reason in ("own_class", "other_class", "index_full", "flushed", "dropped")
    }
    assert removed["own_class"] == 8
    assert removed["other_class"] >= 1
    assert removed["index_full"] == 0
    assert (removed["flushed"], removed["dropped"]) == (flushed, 1)
    stats = daemon.stats()
    assert sum(removed.values()) == stats["saved_chunks"] - int(stats["dram.chunks"])
    assert (stats["dram.evicted_own_class"], stats["dram.evicted_other_class"]) == (8, removed["other_class"])
    assert found["kvpool_chunk_lifetime_seconds_count"] == stats["evicted_chunks"]
    assert found["kvpool_checksum_failures_total"] == 1
    assert found['kvpool_slots{size_class="12288x3",state="used"}'] == 0


def test_a_full_index_is_a_reason_of_its_own(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", dram__max_chunks="8")
    with daemon.connect() as pool:
        for number in range(3):
            store(pool, pool.keys(tokens_of(number, 4 * 32)))
    assert _metrics(_address(daemon))['kvpool_dram_removed_chunks_total{reason="index_full"}'] == 4


@pytest.mark.slow
def test_declined_saves_show_their_reason(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        held, new = pool.keys(tokens_of(1, CHUNKS * 32)), pool.keys(tokens_of(2, 3 * 32))
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client notices")
        assert store(pool, new).declined == 3
        daemon.start()
        wait_connected(pool)
        again = _address(daemon)
        found = _wait_for(again, 'kvpool_declined_chunks_total{reason="disconnected"}', 3)
        assert found['kvpool_declined_chunks_total{reason="full"}'] == 0
        store(pool, held)
        with pool.acquire(pool.lookup(held)):
            store(pool, new)
            found = _wait_for(again, 'kvpool_declined_chunks_total{reason="full"}', 1)
            assert found['kvpool_declined_chunks_total{reason="no_parent"}'] == 2
            assert found["kvpool_leases"] == 1
            assert found["kvpool_held_chunks"] == CHUNKS
        pool.save(new, from_=payload_of(new, SMALL)).abort()
        found = _wait_for(again, 'kvpool_declined_chunks_total{reason="aborted"}', 3)
        assert found["kvpool_aborted_chunks_total"] == 3


def test_a_late_save_is_counted_as_expired_once_whatever_its_engine_does_then(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", server__reservation_ttl="200ms")
    address = _address(daemon)
    with daemon.connect() as pool:
        late = [pool.keys(tokens_of(seed, 3 * 32)) for seed in (1, 2)]
        committed, aborted = (pool.save(keys, from_=payload_of(keys, SMALL)) for keys in late)
        found = _wait_for(address, 'kvpool_declined_chunks_total{reason="expired"}', 2 * 3)
        assert (found["kvpool_expired_reservations_total"], found["kvpool_aborted_chunks_total"]) == (2, 2 * 3)
        assert (found["kvpool_reservations"], found["kvpool_zombie_slots"]) == (0, 0)
        assert dict(committed.commit().reasons) == {"expired": 3}
        aborted.abort()
        assert dict(aborted.wait().reasons) == {"expired": 3}
    wait_until(lambda: daemon.stats()["connections"] == 1, "the last report has come")
    found = _metrics(address)
    assert found['kvpool_declined_chunks_total{reason="expired"}'] == 2 * 3
    assert found['kvpool_declined_chunks_total{reason="aborted"}'] == 0


def test_a_hostile_report_is_cut_and_counted(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    address = _address(daemon)
    with daemon.connect(model="liar") as pool:
        session = pool._link.session
        assert session is not None
        for _ in range(3):
            assert session.notify(m.Usage(b"\xff" * 8 * usage.COUNTS))
        found = _wait_for(address, "kvpool_usage_reports_total", 3)
        assert found["kvpool_usage_clamped_values_total"] > 0
        hit = sum(value for name, value in found.items() if name.startswith("kvpool_hit_tokens_total"))
        assert hit == found['kvpool_lookup_tokens_total{model="liar"}']
        assert session.notify(m.Usage(b"short"))
        wait_until(lambda: daemon.stats()["protocol_errors"] == 1, "a column of another length ends the connection")
    assert daemon.problems() == []


@pytest.mark.slow
def test_port_zero_takes_a_free_port_and_info_shows_it(start_daemon: Callable[..., Daemon]) -> None:
    first, second = (
        start_daemon(server__metrics=ON, server__probe_interval="0s"),
        start_daemon(server__metrics=ON, server__probe_interval="0s"),
    )
    assert _address(first) != _address(second)
    assert not _address(first).endswith(":0")
    assert _get(_address(first), "/readyz")[0] == 200
    assert _address(start_daemon()) == "off"


def test_a_port_in_use_refuses_the_start_by_name(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    with pytest.raises(AssertionError, match=f"server.metrics {_address(daemon)} cannot be bound"):
        start_daemon(server__metrics=_address(daemon))


@pytest.mark.slow
def test_garbage_and_slow_clients_do_no_harm(start_daemon: Callable[..., Daemon], seed: int) -> None:
    noise = random.Random(seed)
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s")
    host, _, port = _address(daemon).rpartition(":")
    assert daemon.process is not None
    tasks = Path(f"/proc/{daemon.process.pid}/task")
    before = len(list(tasks.iterdir()))
    open_sockets = []
    for number in range(5 * CONNECTIONS_MAX):
        peer = socket.create_connection((host, int(port)), timeout=10.0)
        open_sockets.append(peer)
        with contextlib.suppress(OSError):  # refused already: there were too many
            peer.sendall(noise.randbytes(512) if number % 2 else b"GET /metrics HTTP/1.1\r\nslow: ")
    assert len(list(tasks.iterdir())) <= before + 2 * CONNECTIONS_MAX
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 4 * 32))
        assert store(pool, keys).stored == 4
    for peer in open_sockets:
        peer.close()
    wait_until(lambda: len(list(tasks.iterdir())) <= before, "their threads have ended")
    assert _get(_address(daemon), "/healthz")[0] == 200
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()


@pytest.mark.timed
def test_a_hung_control_thread_is_503_within_the_deadline(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, **{"server.metrics": ON, "dram.huge_pages": "off", "server.probe_interval": "0s"})
    sets = [part.removeprefix("--set=") for part in daemon.command() if part.startswith("--set=")]
    with spawn(STANDING_DAEMON, *sets) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wait_until(lambda: Path(daemon.socket).exists(), "the daemon serves")
        address = _address(daemon)
        assert _get(address, "/healthz")[0] == 200
        process.stdin.write("stand\n")
        process.stdin.flush()
        assert process.stdout.readline() == "standing\n"
        started = time.monotonic()
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda path: _get(address, path), ("/metrics", "/healthz", "/readyz")))
        assert time.monotonic() - started < SNAPSHOT_TIMEOUT_S + 2.0
        assert [status for status, _ in answers] == [503, 503, 503]
        assert "did not answer within" in json.loads(answers[1][1])["problems"][0]
        process.stdin.write("go on\n")
        process.stdin.flush()
        wait_until(lambda: _get(address, "/healthz")[0] == 200, "it is well again")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10.0) == 0


def test_not_ready_while_draining(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", server__stop_timeout="600s")
    address = _address(daemon)
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 3 * 32))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: _get(address, "/readyz")[0] == 503, "draining shows")
        assert _get(address, "/healthz")[0] == 200
        result = save.commit()
        assert result is not None
        assert result.stored == 3
    assert daemon.process is not None
    assert daemon.process.wait(60.0) == 0


def test_scrapes_under_load_are_each_of_one_moment(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(server__metrics=ON, server__probe_interval="0s", dram__capacity=CAPACITY)
    address = _address(daemon)
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
                now = _metrics(address)
                removed = sum(
                    value for name, value in now.items() if name.startswith("kvpool_dram_removed_chunks_total")
                )
                saved = sum(value for name, value in now.items() if name.startswith("kvpool_saved_chunks_total"))
                assert saved == now["kvpool_chunks"] + removed
                assert now["kvpool_dram_used_bytes"] <= now["kvpool_dram_capacity_bytes"]
        finally:
            is_over.set()
        assert all(worker.result(60.0) > 0 for worker in workers)
    assert daemon.problems() == []


def test_a_connection_counts_once(daemon: Daemon) -> None:
    accepted = [daemon.stats()["accepted_connections"] for _ in range(3)]
    assert accepted == [accepted[0], accepted[0] + 1, accepted[0] + 2], "each look is one connection"


def test_an_uptime_begins_with_the_daemon(daemon: Daemon) -> None:
    assert 0 < daemon.info()["uptime_s"] < time.monotonic(), "not with the machine"
