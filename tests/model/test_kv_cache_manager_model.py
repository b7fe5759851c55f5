"""KV cache manager under a scripted executor: thousands of random batches, counted by a slow model.

Admission, chunked context, drafts and rewinding, cancellation, and with preemption pausing; every byte of KV is read in each
step.
"""

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.blocks.executor import ScriptedExecutor, manager_of

pytestmark = pytest.mark.torch

SEEDS = 24
BATCHES = 100


@pytest.mark.slow
@pytest.mark.parametrize("may_preempt", [False, True], ids=["guaranteed", "preempting"])
def test_no_block_is_leaked_and_no_shared_block_is_written(may_preempt: bool) -> None:
    totals: dict[str, int] = {}
    for seed in range(SEEDS):
        print(f"seed {seed}")
        manager = manager_of(4 * (14 + seed))
        executor = ScriptedExecutor(manager, seed, may_preempt=may_preempt)
        for number in range(BATCHES):
            for _ in range(seed % 3 + 1):
                if number < BATCHES * 3 // 4:
                    executor.submit()
            executor.step()
            if number % 5 == 0:
                assert manager.verify() == []
        executor.drain()
        assert manager.verify() == []
        assert manager.get_num_free_blocks() == manager.get_max_resource_count()
        for name, count in executor.counts.items():
            totals[name] = totals.get(name, 0) + count
    assert totals["batches"] == SEEDS * BATCHES
    for name in ("finished", "cancelled", "reused", *(("paused", "refused") if may_preempt else ())):
        assert totals[name] > 20, totals
