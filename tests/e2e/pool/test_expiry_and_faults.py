"""Early ends: of leases, reservations, clients, daemons, bytes. The right answer is a shorter one."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from tests.rigs.daemon import SMALL, Daemon, in_both_write_modes, spawn, wait_connected, wait_until
from tests.rigs.payload import assert_right_bytes, chunks_leased, load_all, payload_of, store, tokens_of

CHUNKS = 24
CAPACITY = f"{CHUNKS * SMALL.chunk_bytes}B"

# Is killed with a load and a save under way.
CLIENT = """
import sys, numpy as np, kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.payload import payload_of, tokens_of
pool = kv.connect(sys.argv[1], model="test-model", layout=SMALL, timeout_s=20.0)
lease = pool.acquire(pool.lookup(pool.keys(tokens_of(1, 6 * 32))))
load = pool.load(lease, into=np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8))
keys = pool.keys(tokens_of(2, 6 * 32))
save = pool.save(keys, from_=payload_of(keys, SMALL))
save.layer(0)
print(lease.chunks)
sys.stdin.readline()
"""


@in_both_write_modes
def test_a_client_killed_in_a_load_and_a_save_holds_and_leaves_nothing(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=20.0) as pool:
        loaded, saved = (pool.keys(tokens_of(seed, 6 * 32)) for seed in (1, 2))
        store(pool, loaded)
        with spawn(CLIENT, daemon.socket) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "6\n"
            assert daemon.stats()["reservations"] == 1
            process.kill()
        wait_until(lambda: daemon.stats()["reservations"] == 0, "the dead client's reservation ends")
        wait_until(lambda: daemon.stats()["leases"] == 0, "the dead client's lease ends")
        assert daemon.stats()["pins"] == 0
        assert daemon.stats()["dram.used_bytes"] == 6 * SMALL.chunk_bytes
        assert pool.lookup(saved).chunks == 0
        assert store(pool, saved).stored == 6
        result, into = load_all(pool, loaded)
        assert result.chunks == 6
        assert_right_bytes(loaded, SMALL, result, into)
    assert daemon.problems() == []


def test_an_expired_lease_shortens_the_load(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, server__lease_ttl="200ms")
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        wait_until(lambda: daemon.stats()["leases"] == 0, "the unused lease ends")
        replaced = pool.keys(tokens_of(3, 10 * 32))
        assert store(pool, replaced).stored == 10
        into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
        with pytest.raises(kv.InvalidArgument):
            pool.load(lease, into=into[1:])
        result = pool.load(lease, into=into).wait()
        assert (result.chunks, result.reason) == (CHUNKS - 10, "gone")
        assert_right_bytes(keys, SMALL, result, into)
    assert daemon.problems() == []


@in_both_write_modes
def test_an_expired_reservation_is_declined_and_its_slots_wait_for_its_writer(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "expired_saves", lambda _session: [])  # a client that gets no processor for a while
    daemon = start_daemon(dram__capacity=CAPACITY, server__reservation_ttl="200ms")
    with daemon.connect() as pool, daemon.connect() as other:
        late = pool.keys(tokens_of(1, CHUNKS * 32))
        save = pool.save(late, from_=payload_of(late, SMALL))
        wait_until(lambda: daemon.stats()["dram.zombie_slots"] == CHUNKS, "the reservation expires")
        keys = other.keys(tokens_of(2, 3 * 32))
        assert store(other, keys).declined == 3
        result = save.commit()
        assert result is not None
        assert (result.stored, dict(result.reasons)) == (0, {"expired": CHUNKS})
        assert daemon.stats()["dram.zombie_slots"] == 0
        assert pool.lookup(late).chunks == 0
        # Its own reservations expire as fast, where the machine is slow.
        wait_until(lambda: store(other, keys).declined == 0, "the slots are used again")
    assert daemon.problems() == []


@in_both_write_modes
def test_a_daemon_killed_and_restarted_is_found_again(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 6 * 32))
        store(pool, keys)
        first_epoch = pool.epoch
        lease = pool.acquire(pool.lookup(keys))
        save_keys = pool.keys(tokens_of(2, 4 * 32))
        save = pool.save(save_keys, from_=payload_of(save_keys, SMALL))
        save.layer(0)
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client notices")
        into = np.zeros((6, SMALL.chunk_bytes), np.uint8)
        assert pool.load(lease, into=into).wait() == kv.LoadResult(0, 0, "disconnected")
        result = save.commit()
        assert result is not None
        assert dict(result.reasons) == {"disconnected": 4}
        assert pool.lookup(keys).chunks == 0
        assert chunks_leased(pool, kv.Hit(6, 192, np.ones(6, np.uint8), keys)) == 0
        assert dict(store(pool, keys).reasons) == {"disconnected": 6}
        daemon.start()
        wait_connected(pool)
        assert pool.epoch not in (b"", first_epoch)
        assert pool.lookup(keys).chunks == 0
        assert pool.load(lease, into=into).wait() == kv.LoadResult(0, 0, "disconnected")
        lease.release()
        assert store(pool, keys).stored == 6
        loaded, into = load_all(pool, keys)
        assert loaded.chunks == 6
        assert_right_bytes(keys, SMALL, loaded, into)


def test_a_daemon_killed_in_a_load_gives_right_bytes_or_fewer(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 100 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        into = np.zeros((100, SMALL.chunk_bytes), np.uint8)
        load = pool.load(lease, into=into)
        daemon.kill()
        result = load.wait()
        assert_right_bytes(keys, SMALL, result, into)


def test_connect_without_a_daemon_misses_until_one_appears(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    daemon.kill()
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        assert (pool.connected, pool.epoch) == (False, b"")
        assert pool.lookup(keys).chunks == 0
        assert dict(store(pool, keys).reasons) == {"disconnected": 2}
        daemon.start()
        wait_connected(pool)
        assert store(pool, keys).stored == 2


def test_a_stopped_daemon_costs_one_timeout(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=20.0) as patient, daemon.connect(timeout_s=0.3) as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        store(patient, keys)
        hit = pool.lookup(keys)
        daemon.signal(signal.SIGSTOP)
        assert chunks_leased(pool, hit) == 0
        assert not pool.connected
        assert chunks_leased(pool, hit) == 0
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: chunks_leased(pool, pool.lookup(keys)) == 2, "the pool is served again")


def test_a_flipped_bit_ends_the_load_and_drops_the_chunk(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 6 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        session = lease.hold.session
        assert session is not None
        offset = int(lease.hold.rows.offsets[3]) + SMALL.layer_bytes + 7
        session.arena.view()[offset] ^= 4
        into = np.zeros((6, SMALL.chunk_bytes), np.uint8)
        load = pool.load(lease, into=into)
        result = load.wait()
        assert result == kv.LoadResult(3, 96, "checksum")
        assert_right_bytes(keys, SMALL, result, into)
        assert pool.lookup(keys).chunks == 3
        lease.release()
        assert daemon.stats()["checksum_failures"] == 1
        assert store(pool, keys).stored == 3
    assert daemon.problems() == []


def test_a_report_about_a_good_chunk_drops_nothing(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 3 * 32))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        assert lease.hold.session is not None
        lease.hold.session.call(m.ReportCorrupt(lease.hold.id, 1), m.Done)
        lease.hold.session.call(m.ReportCorrupt(lease.hold.id + 9, 1), m.Done)
        assert pool.lookup(keys).chunks == 3


def test_cancel_ends_a_load(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 200 * 32))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
            load = pool.load(lease, into=into)
            load.cancel()
            seen = into.copy()
            result = load.wait()
            assert result.reason in ("cancelled", "complete")
            assert np.array_equal(seen, into)
            assert not load.wait_layer(2) or result.reason == "complete"


@in_both_write_modes
def test_a_pool_in_a_forked_child_misses(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        store(pool, keys)
        child = os.fork()
        if child == 0:
            is_right = pool.lookup(keys).chunks == 0 and not pool.connected
            pool.close()
            os._exit(0 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.lookup(keys).chunks == 2


def test_sigterm_ends_cleanly_and_removes_the_socket(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, 2 * 32)))
        assert daemon.stop() == 0
    assert not os.path.exists(daemon.socket)
    assert "stopped" in daemon.log()


@in_both_write_modes
def test_a_save_under_way_is_committed_during_the_drain(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 2 * 32))
        save = pool.save(keys, from_=payload_of(keys, SMALL))
        daemon.signal(signal.SIGTERM)
        wait_until(lambda: not daemon.connect().connected, "new connections are refused")
        result = save.commit()
        assert result is not None
        assert result.stored == 2
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0


def test_a_second_daemon_on_a_live_socket_refuses(daemon: Daemon, tmp_path: Path) -> None:
    second = Daemon(tmp_path)
    second.socket = daemon.socket
    second.launch()
    assert second.process is not None
    assert second.process.wait(60) == 1
    assert "already serves" in second.log()
    with daemon.connect() as pool:
        assert pool.connected


def test_a_stale_socket_is_replaced(daemon: Daemon) -> None:
    daemon.kill()
    assert os.path.exists(daemon.socket)
    daemon.start()
    with daemon.connect() as pool:
        assert pool.connected


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (
            m.Hello(m.MAGIC, m.PROTOCOL_VERSION + 1, m.ROLE_ENGINE, "model", SMALL.to_wire(), m.PROTOCOL_VERSION + 1),
            "version",
        ),
        (m.Hello(b"LPVK", m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", SMALL.to_wire()), "protocol"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, "root", "model", SMALL.to_wire()), "role"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", SMALL.to_wire()[:-1]), "layout"),
        (m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "model", [0, *SMALL.to_wire()[1:]]), "layout"),
    ],
)
def test_a_wrong_hello_is_refused_by_name(shared_daemon: Daemon, hello: m.Hello, code: str) -> None:
    from kvpool.errors import Refused
    from kvpool.protocol.blocking import BlockingConnection

    with pytest.raises(Refused) as refusal:
        BlockingConnection(shared_daemon.socket, hello, 60.0)
    assert refusal.value.code == code


def test_garbage_ends_the_connection_and_nothing_else(daemon: Daemon, seed: int) -> None:
    random = np.random.default_rng(seed)
    with daemon.connect() as pool:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.settimeout(60.0)
                raw.connect(daemon.socket)
                raw.sendall(random.bytes(int(random.integers(1, 200))))
                with contextlib.suppress(ConnectionResetError):  # the daemon need not read what it refuses
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(4096):
                        pass
        keys = pool.keys(tokens_of(1, 2 * 32))
        assert store(pool, keys).stored == 2
    assert daemon.problems() == []
