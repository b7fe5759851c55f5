"""Power cuts of the disk below the tier: the daemon lives, nothing wrong is served afterwards, checkpoints are kept.

The file system is shut down without writing its log, as if the machine had lost power: what was not synced is gone.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon, wait_connected, wait_until
from tests.faults.disks import Disk, loop_disk
from tests.faults.fault_filesystem import FaultFilesystem
from tests.faults.tiered import StartDaemon, let_pass, restart, tier_options, wait_open
from tests.faults.traffic import CHAIN, DramClient, Tally, Traffic, chain_of, load_chains
from tests.payload import store

CHAINS = 300
COVERED_CHAINS = 12
WORK_S_MAX = 0.6
# Room for everything that is written in one life: what a checkpoint covered is not evicted for something newer.
CAPACITY = 64 << 20
TURNS = 10


def _cover(daemon: Daemon, first: int) -> range:
    """Chains that a completed checkpoint covers."""
    chains = range(first, first + COVERED_CHAINS)
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        for number in chains:
            store(pool, chain_of(pool, number))
        admin.write_down(10.0)
        found = [pool.lookup(chain_of(pool, number)).chunks for number in chains]
    assert found == [CHAIN] * COVERED_CHAINS
    return chains


def _expect_life_without_a_disk(daemon: Daemon, number: int) -> float:
    """DRAM serves while the tier gives up; the slowest turn of an engine, in seconds."""
    with DramClient(daemon, first_chain=90_000 + 1000 * number) as client:
        for _ in range(TURNS):
            client.turn()
        wait_until(lambda: daemon.stats()["ssd.state"] in ("readonly", "offline"), "the tier gives up")
        client.turn()
        return client.slowest_s


def cut_and_restore(
    daemon: Daemon, disk: Disk | FaultFilesystem, dice: random.Random, number: int
) -> tuple[Tally, Tally, float]:
    """One cut: what was found of the covered chains, and of all; the slowest turn of an engine meanwhile."""
    covered = _cover(daemon, 10_000 + COVERED_CHAINS * number)
    with Traffic(daemon, dice.randrange(1 << 32), chains=CHAINS):
        let_pass(dice.uniform(0.0, WORK_S_MAX))
        disk.cut_power()
        let_pass(dice.uniform(0.0, 0.1))
    slowest_s = _expect_life_without_a_disk(daemon, number)
    daemon.kill()
    disk.restore_power()
    restart(daemon)
    wait_open(daemon)
    kept = Tally()
    with daemon.connect(timeout_s=10.0) as pool:
        wait_connected(pool)
        for chain in covered:
            kept.load(pool, chain)
    assert kept.wrong == []
    assert kept.missed == 0, f"cut {number}: a checkpoint covered {kept.missed} chunks that are not found"
    return kept, load_chains(daemon, CHAINS), slowest_s


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        pytest.param("ext4", 2, id="ext4"),
        pytest.param("xfs", 1, id="xfs"),
        pytest.param("ext4", 80, id="ext4-eighty", marks=pytest.mark.campaign),
        pytest.param("xfs", 30, id="xfs-thirty", marks=pytest.mark.campaign),
    ],
)
def test_a_power_cut_costs_misses_and_no_checkpoint(
    start_daemon: StartDaemon, tmp_path: Path, seed: int, summary: Callable[[str], None], kind: str, cuts: int
) -> None:
    dice = random.Random(seed)
    kept, found, slowest_s = Tally(), Tally(), 0.0
    with loop_disk(kind, tmp_path / "image") as disk:
        daemon = start_daemon(**tier_options(disk.path / "ssd", dram_chunks=96, capacity=CAPACITY))
        try:
            wait_open(daemon)
            for number in range(cuts):
                of_checkpoint, of_all, turn_s = cut_and_restore(daemon, disk, dice, number)
                kept += of_checkpoint
                found += of_all
                slowest_s = max(slowest_s, turn_s)
                with daemon.admin() as admin:
                    admin.flush(None, None)
            assert daemon.problems() == []
        finally:
            daemon.kill()
    summary(
        f"{cuts} cuts of {kind}, {kept.served} chunks of checkpoints kept, {found.served} others served, "
        f"{found.missed} missed, slowest turn without a disk {1e3 * slowest_s:.0f} ms"
    )
