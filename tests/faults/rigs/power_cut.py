"""One power cut of the disk of a tier, on any kind of disk: before it a checkpoint and work, after it a new life.

What must hold: the daemon lives on with DRAM alone, everything served afterwards has the right bytes, and the chunks of the
checkpoint are found.
"""

import random

from tests.faults.rigs.disks import Disk
from tests.faults.rigs.fault_filesystem import FaultFilesystem
from tests.faults.rigs.tiered import let_pass, restart
from tests.faults.rigs.traffic import CHAIN, DramClient, Tally, Traffic, chain_of, load_chains
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.payload import store

CHAINS = 300
COVERED_CHAINS = 12
WORK_S_MAX = 0.6
TURNS = 10


def _cover(daemon: Daemon, first: int) -> range:
    """Chains that a completed checkpoint covers."""
    chains = range(first, first + COVERED_CHAINS)
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        for number in chains:
            store(pool, chain_of(pool, number))
        admin.demote_all(10.0)
        found = [pool.lookup(chain_of(pool, number)).chunks for number in chains]
    assert found == [CHAIN] * COVERED_CHAINS
    return chains


def _expect_life_without_a_disk(daemon: Daemon, number: int) -> float:
    """DRAM serves while the tier fails; the slowest turn of an engine, in seconds."""
    with DramClient(daemon, first_chain=90_000 + 1000 * number) as client:
        for _ in range(TURNS):
            client.turn()
        wait_until(lambda: daemon.stats()["ssd.state"] in ("readonly", "offline"), "the tier gives up")
        client.turn()
        return client.slowest_s


def cut_and_restore(
    daemon: Daemon, disk: Disk | FaultFilesystem, dice: random.Random, number: int
) -> tuple[Tally, Tally, float]:
    """One cut: the chunks found of the covered chains, and of all; the slowest turn of an engine meanwhile."""
    covered = _cover(daemon, 10_000 + COVERED_CHAINS * number)
    with Traffic(daemon, dice.randrange(1 << 32), chains=CHAINS):
        let_pass(dice.uniform(0.0, WORK_S_MAX))
        disk.cut_power()
        let_pass(dice.uniform(0.0, 0.1))
    slowest_s = _expect_life_without_a_disk(daemon, number)
    daemon.kill()
    disk.restore_power()
    restart(daemon)
    daemon.wait_open()
    kept = Tally()
    with daemon.connect(timeout_s=10.0) as pool:
        wait_connected(pool)
        for chain in covered:
            kept.load(pool, chain)
    assert kept.wrong == []
    assert kept.missed == 0, f"cut {number}: a checkpoint covered {kept.missed} chunks that are not found"
    return kept, load_chains(daemon, CHAINS), slowest_s
