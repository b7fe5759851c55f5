"""Clients that are killed at any point of their work: they leave nothing behind, and nobody else is affected."""

import os
import random
import signal
import traceback

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.workload import chain_tokens
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.payload import assert_right_bytes, load_all, store

AT_ONCE = 6
LIFE_S_MAX = 0.6
FREED_WITHIN_S = 1.0
ENDLESS = "1000000"


def _forked_workers(daemon: Daemon, lives_s: list[float]) -> list[int]:
    """Workers as forked children of this process, each killed after its life: starting Python 1,000 times takes too long."""
    children = []
    for life_s in lives_s:
        pid = os.fork()
        if pid == 0:
            _be_worker(daemon.socket, life_s)
        children.append(pid)
    return children


def _be_worker(socket: str, life_s: float) -> None:
    from tests.faults.rigs import workload  # in the child alone

    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, life_s)
    try:
        workload.run(socket, int(ENDLESS))
    finally:
        traceback.print_exc()
        os._exit(3)


def _expect_nothing_left_but_tickets(daemon: Daemon) -> None:
    def is_free() -> bool:
        stats = daemon.stats()
        held = ("leases", "reservations", "dram.writing_chunks", "dram.zombie_slots")
        has_pins = stats["pins"] != 0 and stats["tickets"] == 0
        return int(stats["connections"]) == 1 and not has_pins and all(stats[name] == 0 for name in held)

    wait_until(is_free, "what dead clients held is free", FREED_WITHIN_S)


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [pytest.param(30, id="some"), *batches(200, of=1000)])
def test_killed_clients_leave_nothing(daemon: Daemon, seed: int, deaths: int) -> None:
    dice = random.Random(seed)
    for _ in range(0, deaths, AT_ONCE):
        children = _forked_workers(daemon, [dice.uniform(0.02, LIFE_S_MAX) for _ in range(AT_ONCE)])
        for pid in children:
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), f"a worker ended by itself with {status}"
            assert os.WTERMSIG(status) == signal.SIGKILL
        # Tickets belong to no connection: they expire by themselves.
        _expect_nothing_left_but_tickets(daemon)
    with daemon.connect() as pool:
        for number in range(4):
            keys = pool.keys(chain_tokens(number))
            result, into = load_all(pool, keys)
            assert_right_bytes(keys, SMALL, result, into)
        assert store(pool, pool.keys(chain_tokens(5000))).declined == 0
    assert daemon.problems() == []
