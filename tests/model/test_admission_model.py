"""Random prompts on the daemon's own classes, on a simulated clock: what a write budget admits, and in which order.

After each request every invariant is recounted, so that a chunk without its parent in either tier would be found.
"""

import random

import pytest

from kvpool.config.config import load_config
from kvpool.key_column import KeyColumn
from kvpool.tiering.admission import NS_PER_DAY, Admitted
from kvpool_native import SSD_HEADER_BYTES
from kvpool_tools.sim.node import SimulatedNode
from kvpool_tools.sim.pool import CHUNK_BYTES, POLICIES

SLOT_BYTES = CHUNK_BYTES + SSD_HEADER_BYTES
HOUR_NS = NS_PER_DAY // 24
REQUESTS = 600


class UsageTable:
    """Prompts that go on from earlier ones or are asked again, at times of bursts and pauses."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._prompts: list[list[int]] = [[1]]
        self._blocks = 1
        self.now_ns = 0

    def prompt(self) -> KeyColumn:
        """The next request's keys."""
        self.now_ns += self._chance.choice([10**9, 10**9, HOUR_NS // 40, HOUR_NS // 4])
        base = self._chance.choice(self._prompts[-20:])
        if self._chance.random() < 0.6:
            base = base[: self._chance.randint(1, len(base))]
            fresh = self._chance.randint(1, 8)
            base = [*base, *range(self._blocks + 1, self._blocks + 1 + fresh)][:20]
            self._blocks += fresh
        self._prompts.append(base)
        return KeyColumn.of(block.to_bytes(8, "little") * 4 for block in base)


@pytest.mark.parametrize(
    ("policy", "ssd_blocks"),
    [
        *zip(POLICIES, (400, 20), strict=True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip(POLICIES, (20, 400), strict=True)),
    ],
)
def test_steps_keep_their_order_and_no_more_is_written_than_the_budget(policy: str, ssd_blocks: int, seed: int) -> None:
    hourly = 30
    budget = f"ssd.write_budget={24 * hourly * SLOT_BYTES}B"
    node = SimulatedNode(
        dram_blocks=60, ssd_blocks=ssd_blocks, policy=policy, config=load_config(None, [budget, "ssd.watermark=0.2"])
    )
    admission = node.admission
    assert admission is not None
    usage, seen = UsageTable(seed), set()
    for _ in range(REQUESTS):
        node.serve(usage.prompt(), usage.now_ns)
        step = admission.step(usage.now_ns)
        seen.add(step)
        assert node.verify() == []
        assert node.ssd_blocks_written <= hourly * (usage.now_ns / HOUR_NS + 1)
        assert admission.written_bytes == node.ssd_blocks_written * SLOT_BYTES
        assert step is not Admitted.LIKELY or policy == "class-queues"
    assert {Admitted.ALL, Admitted.USED_AGAIN} <= seen


def test_a_budget_of_one_block_writes_one_block_at_a_time(seed: int) -> None:
    budget = f"ssd.write_budget={12 * SLOT_BYTES}B"
    node = SimulatedNode(dram_blocks=30, ssd_blocks=100, policy="lru", config=load_config(None, [budget]))
    usage = UsageTable(seed)
    for _ in range(REQUESTS):
        node.serve(usage.prompt(), usage.now_ns)
        assert node.ssd_blocks_written <= usage.now_ns / HOUR_NS / 2 + 1
    assert node.ssd_blocks_written > 1
    assert node.verify() == []
