"""Power cuts of the tier's disk: the daemon lives, no wrong byte is served afterwards, checkpoints survive.

The file system is shut down without writing its log, as if the machine had lost power: what was not synced is gone.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.disks import loop_disk
from tests.faults.rigs.power_cut import cut_and_restore
from tests.faults.rigs.tiered import assert_sound, tier_options
from tests.faults.rigs.traffic import Tally
from tests.rigs.daemon import Start

# Room for everything that is written in one life: no chunk of a checkpoint is evicted for a newer one.
CAPACITY = 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        pytest.param("ext4", 2, id="ext4"),
        pytest.param("xfs", 1, id="xfs"),
        *batches("ext4", 20, of=80),
        *batches("xfs", 10, of=30),
    ],
)
def test_a_power_cut_costs_misses_and_no_checkpoint(
    start_daemon: Start, tmp_path: Path, seed: int, summary: Callable[[str], None], kind: str, cuts: int
) -> None:
    dice = random.Random(seed)
    kept, found, slowest_s = Tally(), Tally(), 0.0
    with loop_disk(kind, tmp_path / "image") as disk:
        daemon = start_daemon(**tier_options(disk.path / "ssd", dram_chunks=96, capacity=CAPACITY, policy="lru"))
        try:
            daemon.wait_open()
            for number in range(cuts):
                of_checkpoint, of_all, turn_s = cut_and_restore(daemon, disk, dice, number)
                kept += of_checkpoint
                found += of_all
                slowest_s = max(slowest_s, turn_s)
                with daemon.admin() as admin:
                    admin.flush(None, None)
            assert_sound(daemon)
        finally:
            daemon.kill()
    summary(
        f"{cuts} cuts of {kind}, {kept.served} chunks of checkpoints kept, {found.served} others served, "
        f"{found.missed} missed, slowest turn without a disk {1e3 * slowest_s:.0f} ms"
    )
