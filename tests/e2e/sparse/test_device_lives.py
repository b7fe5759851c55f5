"""Random lives of sequences on a device, with staging areas of all sizes, against the same model as those of the host."""

import random

import pytest
import torch

import kvpool_client as kv
from kvpool_sparse import SequenceLost, SparseSequence
from kvpool_sparse.device import DeviceSequence
from tests.e2e.sparse.test_device_sequences import device, prefetch_threads
from tests.e2e.sparse.test_sequence_lives import LAYOUT, STEPS, World
from tests.rigs.daemon import Daemon, wait_until

__all__ = ["device"]  # a fixture


class DeviceWorld(World):
    """Sequences on a device, whose tables are verified after every check."""

    def __init__(self, daemon: Daemon, pool: kv.Pool, seed: int, *, device: torch.device) -> None:
        super().__init__(daemon, pool, seed)
        self.device = device

    def begin(self) -> None:
        before = len(self.lives)
        super().begin()
        for life in self.lives[before:]:
            assert isinstance(life.sequence, SparseSequence)
            blocks = self.random.choice([2, 7, 20, 60, 200])
            try:
                life.sequence = DeviceSequence(life.sequence, device=self.device, staging_blocks=blocks)
            except SequenceLost:
                self.lives.remove(life)
                raise

    def check(self) -> None:
        super().check()
        for life in self.lives:
            assert isinstance(life.sequence, DeviceSequence)
            if not self.is_closed(life):
                life.sequence.stats()  # waits for a prefetch
                life.sequence._staging.table.verify()


@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
def test_random_lives_on_a_device_are_right_or_lost(device: torch.device, daemon: Daemon, case: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30) if case else 21
    print(f"seed {seed}")
    before = prefetch_threads()
    with daemon.connect(layout=LAYOUT) as pool:
        world = DeviceWorld(daemon, pool, seed, device=device)
        for _ in range(STEPS):
            world.step()
        for life in world.lives:
            life.sequence.close()
    assert world.checked > 5, "the seed has made hardly any checks"
    assert prefetch_threads() == before
    wait_until(lambda: daemon.stats()["leases"] == 0, "every lease has ended")
    assert daemon.problems() == []
