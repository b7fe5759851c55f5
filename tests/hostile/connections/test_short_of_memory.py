"""A daemon that runs out of memory: it ends with a message, or refuses, and never serves a wrong byte."""

import contextlib
import resource
import subprocess
from pathlib import Path

import pytest

from kvpool.errors import KVPoolError, Refused
from kvpool.protocol.records import messages as m
from tests.hostile.rigs.daemon_watch import pid_of
from tests.hostile.rigs.raw_clients import engine, keys_of, raw_engine, read_back, reserve, store
from tests.rigs.daemon import Daemon, wait_until

KEYS = keys_of(0, 40)


def _limited(command: list[str], address_space_kib: int) -> list[str]:
    return ["/bin/sh", "-c", f'ulimit -v {address_space_kib}; exec "$@"', "sh", *command]


@pytest.mark.parametrize("capacity", ["8GiB", pytest.param("4TiB", marks=pytest.mark.slow)])
def test_an_arena_that_cannot_be_allocated_ends_the_start_with_a_reason(tmp_path: Path, capacity: str) -> None:
    daemon = Daemon(tmp_path, **{"dram.capacity": capacity})
    ended = subprocess.run(
        _limited(daemon.command(), 2 << 20), capture_output=True, text=True, timeout=60.0, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert "cannot serve: " in ended.stderr
    assert "memory" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("*.sock*")) or not Path(daemon.socket).exists()


def _address_space(daemon: Daemon) -> int:
    for line in Path(f"/proc/{pid_of(daemon)}/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say VmSize")


def _is_serving(daemon: Daemon) -> bool:
    try:
        daemon.stats()
    except (KVPoolError, OSError):
        return False
    return True


@pytest.mark.parametrize("spare_bytes", [0, pytest.param(1 << 20, marks=pytest.mark.slow), 4 << 20])
def test_a_daemon_short_of_memory_refuses_or_ends_and_gives_no_wrong_byte(tmp_path: Path, spare_bytes: int) -> None:
    daemon = Daemon(tmp_path, **{"dram.capacity": "64MiB"})
    daemon.environment["MALLOC_ARENA_MAX"] = "1"  # others are address space that it has already
    daemon.may_log_errors = True  # MemoryError, wherever it comes
    with daemon:
        with contextlib.ExitStack() as stack:
            assert daemon.process is not None
            good = stack.enter_context(engine(daemon))
            store(good, KEYS)
            limit = _address_space(daemon) + spare_bytes
            hard = resource.prlimit(pid_of(daemon), resource.RLIMIT_AS)[1]
            resource.prlimit(pid_of(daemon), resource.RLIMIT_AS, (limit, hard))
            outcomes = set()
            raws = []
            for turn in range(30):
                try:
                    hostile = stack.enter_context(engine(daemon))
                    for _ in range(2):
                        hostile.call(m.Acquire(KEYS + bytes(32 * (m.KEYS_MAX - 40))), m.Leased)
                    reserve(hostile, keys_of(1000 * (turn + 1), 500))
                    raws.append(stack.enter_context(raw_engine(daemon)))
                    raws[-1].sendall((1 << 20).to_bytes(4, "little") + bytes((1 << 20) - 1))
                    outcomes.add("served")
                except Refused as error:
                    outcomes.add(f"refused {error.code}")
                except (KVPoolError, OSError) as error:
                    outcomes.add(type(error).__name__)
                with contextlib.suppress(KVPoolError):
                    assert set(read_back(good, KEYS)) <= {True}
                if daemon.process.poll() is not None:
                    break
        process = daemon.process
        wait_until(lambda: process.poll() is not None or _is_serving(daemon), "it serves or has ended")
        code = process.poll()
        print(f"spare {spare_bytes}: {sorted(outcomes)}, exit code {code}")
        if code is None:
            resource.prlimit(pid_of(daemon), resource.RLIMIT_AS, (hard, hard))
            wait_until(lambda: daemon.stats()["connections"] == 1, "every connection has ended")
            assert daemon.problems(deep=True) == []
            assert daemon.stats()["pins"] == 0
        else:
            assert code == 1, daemon.log()[-3000:]
            assert "memory" in daemon.log()
