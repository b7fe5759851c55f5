"""A device above DRAM under random saves, leases, flushes and failures: right bytes or none, and every book agrees after each
step.

The model is a set of the chunks that were acknowledged, and the rule that whoever finds a copy finds the bytes of its key:
each step compares every copy that an engine gets with what its key says, and recounts all invariants.
"""

import asyncio
import os
import random

from kvpool.states import Level
from kvpool.tiers.base import Outcome, TierState
from tests.rigs.tiers.copies_pool import BIG, DEVICE_CHUNKS, CopiesPool
from tests.rigs.tiers.tiered_pool import key_of, medium_of

DRAM_CHUNKS = 64
LONGEST = 24
LIVES, STEPS = 2, 120


def chain_of(chance: random.Random) -> list[bytes]:
    """Chains of three families, of which two branch off each."""
    family, branch, length = chance.randrange(3), chance.randrange(2), chance.randrange(1, LONGEST)
    return [key_of(family, branch if number >= LONGEST // 2 else -1, number) for number in range(length)]


async def step(pool: CopiesPool, chance: random.Random, stored: set[bytes]) -> None:
    """One random operation."""
    keys, drawn, device = chain_of(chance), chance.random(), pool.device
    if drawn < 0.25:
        stored.update(await pool.saved(keys))
    elif drawn < 0.6:
        copied = await pool.read_copies(keys)
        assert stored.issuperset(keys[:copied]), "a copy that nobody stored"
    elif drawn < 0.75:
        assert stored.issuperset(keys[: await pool.load(keys, is_patient=False)]), "a chunk that nobody stored"
    elif drawn < 0.8:
        await pool.flush(chance.choice(["hbm", "dram", ""]))
    elif drawn < 0.84:
        leased = await pool.lease(keys)
        if leased.lease:
            pool.pool.discard(chance.choice(keys))
            pool.pool.leases.release(pool.session, leased.lease)
    elif drawn < 0.92:
        rate = chance.choice([0.0, 0.0, 0.3])
        dice = random.Random(chance.random())
        device.outcome_of = lambda _kind, _number: Outcome.FAILED if dice.random() < rate else Outcome.DONE
        device.is_withholding = chance.random() < 0.4
        device.release()
    else:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)


def run_lives(*, has_disk: bool) -> None:
    seed = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVPOOL_SEED={seed}")
    chance, copied, given_up = random.Random(seed), 0, 0

    async def live() -> None:
        nonlocal copied, given_up
        media = [medium_of(4 * DRAM_CHUNKS * BIG.chunk_bytes // 4096)] if has_disk else []
        pool, stored = CopiesPool(DRAM_CHUNKS, media=media), set[bytes]()
        await pool.start()
        await pool.open_device()
        for _ in range(STEPS):
            await step(pool, chance, stored)
            await asyncio.sleep(0)
            pool.assert_sound()
            counted = pool.link.stats()
            assert int(counted["hbm.chunks"]) <= DEVICE_CHUNKS
            assert int(counted["hbm.promoted_chunks"]) <= pool.may_have_copied(), "more is copied than was earned"
        given_up += pool.link.tier.state is TierState.OFFLINE
        pool.device.is_withholding = False
        pool.device.release()
        await pool.settled()
        pool.assert_sound()
        copied += int(pool.link.stats()["hbm.promoted_chunks"])
        await pool.stop()

    for _ in range(LIVES):
        asyncio.run(live())
    assert copied > 0, "nothing was copied"
    assert given_up < LIVES


def test_copies_above_dram_and_a_disk_have_the_bytes_of_their_keys_or_are_not_found() -> None:
    run_lives(has_disk=True)


def test_events_of_copies_add_up_to_the_tiers_that_chunks_are_in() -> None:
    async def run() -> None:
        pool = CopiesPool(DRAM_CHUNKS)
        await pool.start()
        await pool.open_device()
        chain = [key_of(9, number) for number in range(4)]
        assert await pool.save(chain) == len(chain)
        await pool.load(chain)
        await pool.settled()
        await pool.flush("hbm")
        await pool.load(chain[:2])
        await pool.settled()
        tiers: dict[bytes, int] = {}
        for event in pool.pool.journal.since(b"", 0).events:
            for key in event.chunks:
                assert tiers.get(key, 0) == event.tiers_before
                tiers[key] = event.tiers
        both = 1 << Level.HBM | 1 << Level.DRAM
        assert [tiers[key] for key in chain] == [both, both, 1 << Level.DRAM, 1 << Level.DRAM]
        await pool.stop()

    asyncio.run(run())
