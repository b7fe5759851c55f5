"""The daemon killed at random moments of its life: what is served afterwards has the right bytes, and no more disk is used."""

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median_low

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.tiered import (
    CAPACITY,
    DEAD_S_MAX,
    assert_sound,
    directory_bytes,
    let_pass,
    restart,
    tier_options,
)
from tests.faults.rigs.traffic import Tally, Traffic, load_chains
from tests.rigs.daemon import Daemon, Start

# Twice what the tier has room for, so that it evicts too.
CHAINS = 300
WORK_S_MAX = 0.6
START_S_MAX = 0.7
DRAIN_S_MAX = 0.1


def _kill_somewhere(daemon: Daemon, dice: random.Random) -> str:
    """Kill a daemon that works: while it serves, mostly; while it starts; while it stops."""
    let_pass(dice.uniform(0.0, WORK_S_MAX))
    roll = dice.random()
    if roll < 0.1:
        daemon.signal(15)
        let_pass(dice.uniform(0.0, DRAIN_S_MAX))
        daemon.kill()
        return "stopping"
    daemon.kill()
    if roll < 0.3:
        daemon.launch()
        let_pass(dice.uniform(0.0, START_S_MAX))
        daemon.kill()
        return "starting"
    return "serving"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(8, id="some"), *batches(40, of=200)])
def test_kills_of_the_daemon_leave_right_bytes_or_none(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int
) -> None:
    dice = random.Random(seed)
    path = tmp_path / "ssd"
    daemon = start_daemon(**tier_options(path))
    daemon.wait_open()
    found, waits = Tally(), []
    moments = {"serving": 0, "starting": 0, "stopping": 0}
    with Traffic(daemon, seed, chains=CHAINS) as traffic:
        for _ in range(kills):
            moments[_kill_somewhere(daemon, dice)] += 1
            assert directory_bytes(path) <= CAPACITY
            waits.append(restart(daemon))
            daemon.wait_open()
            found += load_chains(daemon, CHAINS)
            assert_sound(daemon)
            assert directory_bytes(path) <= CAPACITY
    summary(
        f"{kills} kills ({moments}), {found.served} chunks served after them, {found.missed} missed, "
        f"{traffic.tally.served} served meanwhile, slowest restart {max(waits):.2f} s"
    )
    assert found.served > 0, "something is found after a kill"
    assert median_low(waits) <= DEAD_S_MAX
