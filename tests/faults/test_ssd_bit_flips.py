"""Flipped bits in segment files and in the catalogue: each is a miss or harmless, and no daemon stays dead of it."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import median_low

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.damage import flip_anywhere, flip_in_slots
from tests.faults.rigs.tiered import (
    CAPACITY,
    DEAD_S_MAX,
    assert_sound,
    directory_bytes,
    is_dead,
    restart,
    tier_options,
)
from tests.faults.rigs.traffic import CHAIN, Tally, WrongBytes, fill, load_chains
from tests.rigs.daemon import SMALL, Daemon, Start, wait_until

CHAINS = 30
FLIPS_A_ROUND = 20
SLOT_BYTES = SMALL.chunk_bytes + 4096
FAILURES_IN_A_ROUND_MAX = 4


@pytest.mark.parametrize("rounds", [pytest.param(1, id="a-round"), *batches(10, of=40)])
def test_flips_in_segment_files_under_a_daemon_are_misses(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], rounds: int
) -> None:
    dice = random.Random(seed)
    daemon = start_daemon(**tier_options(tmp_path / "ssd"))
    daemon.wait_open()
    segments = sorted((tmp_path / "ssd").glob("segment-*.kvs"))
    flips, waits, found = 0, [0.0], Tally()
    for number in range(rounds):
        # A tier whose disk changes bytes is suspended; damage from an earlier life does not count.
        if daemon.stats()["ssd.state"] == "readonly":
            assert daemon.stop() == 0
            restart(daemon)
        fill(daemon, CHAINS)
        if number % 2:
            daemon.kill()
        flips += flip_in_slots(segments, FLIPS_A_ROUND, SLOT_BYTES, dice)
        if number % 2:
            waits.append(restart(daemon))
            daemon.wait_open()
        found += load_chains(daemon, CHAINS)
        assert not is_dead(daemon), daemon.log()
        assert daemon.stats()["ssd.corrupt_chunks"] > 0
        assert_sound(daemon)
    summary(f"{flips} flips in slots, {found.served} chunks served, {found.missed} missed")
    assert median_low(waits) <= DEAD_S_MAX
    assert flips == rounds * FLIPS_A_ROUND
    assert found.served > 0


def _work_until_it_holds(daemon: Daemon) -> int:
    """Load and fill as often as it takes until a daemon gets through both; how often it died of it.

    A damaged page may be found by a write long after the start: then the tier is closed, and opened with a new catalogue.
    """
    deaths = 0
    for _ in range(FAILURES_IN_A_ROUND_MAX):
        closed = _times_closed(daemon)
        try:
            load_chains(daemon, CHAINS)
            fill(daemon, CHAINS)
            assert_sound(daemon)
        except WrongBytes:
            raise
        except Exception:
            wait_until(
                lambda: is_dead(daemon) or _times_closed(daemon) > closed,  # noqa: B023 - waited for here
                f"a daemon that fails has died or closed its tier: {daemon.log()[-2000:]}",
                1.0,
            )
        else:
            return deaths
        if is_dead(daemon):
            deaths += 1
            restart(daemon)
        else:
            daemon.wait_open()
    raise AssertionError(f"the daemon fails on and on: {daemon.log()[-3000:]}")


def _times_closed(daemon: Daemon) -> int:
    return daemon.log().count("ssd tier OFFLINE")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [pytest.param(2, id="some"), *batches(20, of=80)])
def test_flips_in_the_catalogue_are_misses_and_stop_no_daemon_for_long(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], rounds: int
) -> None:
    dice = random.Random(seed)
    path = tmp_path / "ssd"
    daemon = start_daemon(**tier_options(path))
    daemon.wait_open()
    fill(daemon, CHAINS)
    flips, deaths, kept, waits, found = 0, 0, 0, [], Tally()
    for _ in range(rounds):
        if dice.random() < 0.5:
            daemon.kill()
        else:
            daemon.signal(signal.SIGTERM)
            assert daemon.process is not None
            daemon.process.wait(20.0)
        flips += flip_anywhere(path / "catalogue" / "data.mdb", dice.choice((1, 4, 20)), dice)
        waits.append(restart(daemon))
        here = load_chains(daemon, CHAINS) if not is_dead(daemon) else Tally()
        kept += here.served > 0
        found += here
        deaths += _work_until_it_holds(daemon)
        daemon.wait_open()
        assert directory_bytes(path) <= CAPACITY
    summary(
        f"{flips} flips in {rounds} catalogues, {kept} kept, {found.served} of {rounds * CHAINS * CHAIN} chunks served, "
        f"{deaths} deaths, slowest restart {max(waits):.2f} s"
    )
    assert median_low(waits) <= DEAD_S_MAX
