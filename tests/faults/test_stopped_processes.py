"""Processes that are stopped past their deadlines and continue: their holds are gone, and no byte of anybody is wrong."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, Start, spawn, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNKS = 24
CAPACITY = f"{CHUNKS * SMALL.chunk_bytes}B"
CHAIN = 6
TIMEOUT_S = 0.5

READER = """
import sys, numpy as np, kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.payload import assert_right_bytes, tokens_of
pool = kv.connect(sys.argv[1], model="test-model", layout=SMALL, timeout_s=60.0)
keys = pool.keys(tokens_of(1, 6 * 32))
lease = pool.acquire(pool.lookup(keys))
print(lease.chunks)
sys.stdin.readline()
into = np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)
result = pool.load(lease, into=into).wait()
assert_right_bytes(keys, SMALL, result, into)
print(result.chunks, result.reason)
"""

WRITER = """
import sys, kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.payload import payload_of, tokens_of
pool = kv.connect(sys.argv[1], model="test-model", layout=SMALL, timeout_s=60.0)
keys = pool.keys(tokens_of(1, 6 * 32))
save = pool.save(keys, from_=payload_of(keys, SMALL))
save.layer(0)
print("reserved")
sys.stdin.readline()
result = save.commit()
print(result.stored, dict(result.reasons))
"""


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _go_on(process: "subprocess.Popen[str]") -> str:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return _read_line(process)


def _replace_everything(pool: kv.Pool, seeds: range) -> list[kv.KeyChain]:
    chains = [pool.keys(tokens_of(seed, CHAIN * SMALL.chunk_tokens)) for seed in seeds]
    for keys in chains:
        store(pool, keys)
    return chains


def test_a_lease_holder_that_was_stopped_reads_right_bytes_or_none(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, server__lease_ttl="100ms")
    with daemon.connect() as pool:
        store(pool, pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens)))
        with spawn(READER, daemon.socket) as reader:
            assert _read_line(reader) == str(CHAIN)
            reader.send_signal(signal.SIGSTOP)
            wait_until(lambda: daemon.stats()["leases"] == 0, "the lease of the stopped reader has expired")
            _replace_everything(pool, range(10, 16))
            reader.send_signal(signal.SIGCONT)
            assert _go_on(reader) == "0 gone"
    assert daemon.problems() == []


def test_a_writer_that_was_stopped_changes_no_other_bytes(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, server__reservation_ttl="2s")
    with daemon.connect() as pool:
        with spawn(WRITER, daemon.socket) as writer:
            assert _read_line(writer) == "reserved"
            writer.send_signal(signal.SIGSTOP)
            wait_until(lambda: daemon.stats()["dram.zombie_slots"] == CHAIN, "the reservation has expired")
            chains = _replace_everything(pool, range(10, 15))
            writer.send_signal(signal.SIGCONT)
            assert _go_on(writer) == "0 {'expired': 6}"
            assert daemon.stats()["dram.zombie_slots"] == 0, "its word frees the slots"
        for keys in chains:
            result, into = load_all(pool, keys)
            assert_right_bytes(keys, SMALL, result, into)
        assert pool.lookup(pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))).chunks == 0
        assert pool.lookup(chains[-1]).chunks == CHAIN
    assert daemon.problems() == []


@pytest.mark.timed
def test_a_release_does_not_wait_for_a_stopped_daemon_and_arrives_when_it_continues(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=TIMEOUT_S) as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store(pool, keys)
        leases = [pool.acquire(pool.lookup(keys)) for _ in range(3)]
        daemon.signal(signal.SIGSTOP)
        started = time.monotonic()
        for lease in leases:
            lease.release()
        assert time.monotonic() - started < TIMEOUT_S / 2
        assert pool.connected
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: daemon.stats()["leases"] == 0, "all of them have arrived")
        assert pool.stats()["reconnects"] == 0
    assert daemon.problems() == []


def _faketime() -> list[str]:
    """A command under which wall-clock time can be made to jump, or the reason to skip."""
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed: apt-get install faketime")
    return ["faketime", "-f", "+0"]


@pytest.mark.slow
@pytest.mark.parametrize("jump", ["+10d", "-10d"])
def test_a_jump_of_the_wall_clock_has_no_effect(daemon: Daemon, tmp_path: Path, jump: str) -> None:
    _faketime()
    library = next(Path("/usr/lib").rglob("libfaketimeMT.so.1"))
    clock = tmp_path / "clock"
    clock.write_text("+0")
    assert daemon.stop() == 0
    daemon.environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    daemon.start()
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, CHAIN * SMALL.chunk_tokens))
        store(pool, keys)
        lease = pool.acquire(pool.lookup(keys))
        clock.write_text(jump)
        other = pool.keys(tokens_of(2, CHAIN * SMALL.chunk_tokens))
        assert store(pool, other).stored == CHAIN
        assert daemon.stats()["leases"] == 1
        into = np.zeros((CHAIN, SMALL.chunk_bytes), np.uint8)
        result = pool.load(lease, into=into).wait()
        assert result.chunks == CHAIN
        assert_right_bytes(keys, SMALL, result, into)
        lease.release()
        assert daemon.stats()["uptime_s"] < 60
    assert daemon.problems() == []
