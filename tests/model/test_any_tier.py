"""A tier that is plugged in under DRAM and named in its own file alone: random operations, failures, restarts.

The model records the acknowledged chunks. The pool may evict, it may not invent: a load gives a prefix of the chunks that
the model knows, with the bytes of their keys; all counts agree after each step; chunks in lower tiers outlive a restart.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvpool.index.namespaces import Namespace
from kvpool.protocol import verify_walk
from kvpool.protocol.records import messages as m
from kvpool.states import DEFAULT_PRIORITY, Level, RetainState
from kvpool.tiers.base import NOT_STARTED, JobId, Moves
from tests.rigs.tiers.memory_tier import Fault, Medium
from tests.rigs.tiers.tiered_pool import MOVED_S, TieredPool, key_of, medium_of

DRAM_CHUNKS = 24
LONGEST = 12
LIVES, STEPS = 4, 90
# Of the lives that every run of the tests plays.
FEW_LIVES, FEW_STEPS = 2, 60
CHAIN = [key_of(0, number) for number in range(8)]
OTHER = [key_of(1, number) for number in range(8)]


def chain_of(chance: random.Random) -> list[bytes]:
    """Chains of four families, of which two branch off each."""
    family, branch, length = chance.randrange(4), chance.randrange(2), chance.randrange(1, LONGEST)
    return [key_of(family, branch if number >= LONGEST // 2 else -1, number) for number in range(length)]


async def play(pool: TieredPool, chance: random.Random, stored: set[bytes], steps: int) -> None:
    """One life. Failures start and end, chunk by chunk; withheld chunks are reported later, or never."""
    faults = {"rate": 0.0, "withheld": 0.0}
    dice = random.Random(chance.random())  # of the tiers' threads

    def fault_of(_kind: str, _key: bytes) -> Fault:
        drawn = dice.random()
        if drawn < faults["rate"]:
            return Fault.ERROR
        return Fault.WITHHELD if drawn < faults["rate"] + faults["withheld"] else Fault.NONE

    for tier in pool.tiers:
        tier.fault_of = fault_of
    for _ in range(steps):
        keys, drawn = chain_of(chance), chance.random()
        if drawn < 0.4:
            stored.update(await pool.saved(keys))
        elif drawn < 0.8:
            found = await pool.load(keys, is_patient=not faults["withheld"] and not moving(pool))
            assert stored.issuperset(keys[:found]), "a chunk that nobody stored"
        elif drawn < 0.84:
            await pool.flush(chance.choice(["dram", "memory", ""]))
        elif drawn < 0.9 and pool.tiers[0].medium.rows:
            tier = chance.choice(pool.tiers)
            if tier.medium.rows:
                tier.medium.spoil(chance.choice(list(tier.medium.rows)))
        elif drawn < 0.95:
            faults["rate"] = chance.choice([0.0, 0.0, 0.3])
            faults["withheld"] = chance.choice([0.0, 0.0, 0.2])
            for tier in pool.tiers:
                tier.accepts_jobs = chance.random() < 0.8
                tier.release_withheld()
        await asyncio.sleep(0)
        pool.assert_sound()
    faults.update(rate=0.0, withheld=0.0)
    for tier in pool.tiers:
        tier.accepts_jobs = True
    await pool.until_moved(lambda: not sum(tier.release_withheld() for tier in pool.tiers) and not moving(pool))


def moving(pool: TieredPool) -> int:
    """Promotions and demotions under way."""
    links = pool.pool._tiering.lower
    return sum(len(link.promotions) + len(link.demotions) for link in links)


def run_lives(media: Sequence[Medium], levels: Sequence[Level], lives: int = FEW_LIVES, steps: int = FEW_STEPS) -> int:
    """Lives over the same media; how many chunks have come back from below."""
    seed = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVPOOL_SEED={seed}")
    chance, stored, promoted = random.Random(seed), set[bytes](), [0]

    async def live() -> None:
        pool = TieredPool(media, DRAM_CHUNKS, levels=levels)
        await pool.start()
        kept = {key for medium in media for key in medium.rows}
        assert stored.issuperset(kept)
        await play(pool, chance, stored, steps)
        left = await pool.demote()
        assert left == pool.pool._directory.count_unsaved()
        promoted[0] += pool.pool.measure({}).directory["promoted_chunks"]
        await pool.stop()

    for _ in range(lives):
        asyncio.run(live())
    return promoted[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiers",
    [
        [(3 * DRAM_CHUNKS, Level.SSD)],
        [(DRAM_CHUNKS // 2, Level.SSD)],
        [(DRAM_CHUNKS, Level.SSD), (2 * DRAM_CHUNKS, Level.PEER)],
    ],
    ids=["instead-of-the-disk", "smaller-than-dram", "two"],
)
def test_tiers_serve_right_bytes_or_none_over_long_lives(tiers: list[tuple[int, Level]]) -> None:
    promoted = run_lives([medium_of(chunks) for chunks, _ in tiers], [level for _, level in tiers], LIVES, STEPS)
    assert promoted > 0, "nothing has come back from below"


def test_a_tier_smaller_than_dram_is_used_up_to_its_capacity() -> None:
    run_lives([medium_of(DRAM_CHUNKS // 2)], [Level.SSD])


def test_two_tiers_beside_one_another_serve_right_bytes_or_none() -> None:
    run_lives([medium_of(DRAM_CHUNKS), medium_of(2 * DRAM_CHUNKS)], [Level.SSD, Level.PEER])


def test_chunks_refused_by_one_tier_are_written_to_the_other_and_bad_bytes_are_dropped_per_tier() -> None:
    async def run() -> None:
        pool = TieredPool([medium_of(100), medium_of(100)], DRAM_CHUNKS, levels=[Level.SSD, Level.PEER])
        await pool.start()
        fast, slow = pool.tiers
        for tier, other, chain in ((fast, slow, CHAIN), (slow, fast, OTHER)):
            tier.accepts_jobs, other.accepts_jobs = True, False
            assert await pool.save(chain) == len(chain)
            assert await pool.demote() == 0
        fast.accepts_jobs = slow.accepts_jobs = True
        assert (set(fast.medium.rows), set(slow.medium.rows)) == (set(CHAIN), set(OTHER))
        await pool.flush("dram")
        slow.medium.spoil(OTHER[5])
        assert (await pool.load(CHAIN), await pool.load(OTHER)) == (len(CHAIN), 5)
        await pool.until_moved(lambda: not moving(pool))
        slow.keep_up()
        assert (set(fast.medium.rows), set(slow.medium.rows)) == (set(CHAIN), set(OTHER[:5]))
        await pool.stop()

    asyncio.run(run())


async def deep_check(pool: TieredPool) -> list[dict[str, object]]:
    """The bad chunks of every tier."""
    everything = list(verify_walk.every(pool.pool.verify()["tiers"]))
    looked_at = 0
    bad: list[dict[str, object]] = []
    while looked_at < len(everything):
        report = await pool.pool.verify_bytes(verify_walk.pack(everything[looked_at:][:64]), 64)
        looked_at, bad = looked_at + report["looked_at"], bad + report["bad"]
    return bad


def in_pool(check: Callable[[TieredPool], Awaitable[None]], medium: Medium | None = None) -> None:
    """One life with two chains that only the lower tier has."""

    async def run() -> None:
        pool = TieredPool([medium or medium_of(100)], DRAM_CHUNKS)
        await pool.start()
        for chain in (CHAIN, OTHER):
            assert await pool.save(chain) == len(chain)
        assert await pool.demote() == 0
        await pool.flush("dram")
        await check(pool)
        pool.tier.fault_of = lambda _kind, _key: Fault.NONE
        await pool.stop()

    asyncio.run(run())


def test_wrong_bytes_are_a_miss_and_dropped_in_their_tier() -> None:
    async def check(pool: TieredPool) -> None:
        assert await pool.load(OTHER) == len(OTHER)
        pool.tier.medium.spoil(CHAIN[3])
        assert await pool.load(CHAIN) == 3
        below = pool.tier.slots.directory
        assert [below.retention(key) is not None for key in CHAIN] == [True] * 3 + [False] * 5, "with what follows it"
        assert await pool.load(OTHER) == len(OTHER), "nobody else has lost anything"
        assert await pool.save(CHAIN) == len(CHAIN)
        assert await pool.load(CHAIN) == len(CHAIN)

    in_pool(check)


def test_a_read_that_fails_is_a_miss_and_the_source_stays() -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.fault_of = lambda _kind, key: Fault.ERROR if key == CHAIN[5] else Fault.NONE
        assert await pool.load(CHAIN) == 5
        assert pool.tier.slots.directory.retention(CHAIN[5]) is not None
        pool.tier.fault_of = lambda _kind, _key: Fault.NONE
        assert await pool.load(CHAIN) == len(CHAIN)

    in_pool(check)


def test_a_tier_that_never_completes_delays_no_other_request() -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.fault_of = lambda _kind, key: Fault.WITHHELD if key in CHAIN else Fault.NONE
        assert await pool.load(CHAIN, is_patient=False) == 0
        await pool.until_moved(lambda: pool.tier.withheld == len(CHAIN))
        assert await pool.load(OTHER) == len(OTHER)
        assert await pool.save([key_of(2, 0)]) == 1
        pool.assert_sound()

    in_pool(check)


def test_reads_that_complete_late_and_in_reverse_order_land() -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.fault_of = lambda _kind, _key: Fault.WITHHELD
        assert await pool.load(CHAIN, is_patient=False) == 0
        await pool.until_moved(lambda: pool.tier.withheld == len(CHAIN))
        pool.assert_sound()
        assert pool.tier.release_withheld() == len(CHAIN)
        assert await pool.load(CHAIN) == len(CHAIN)

    in_pool(check)


def test_a_tier_that_takes_no_jobs_is_a_miss() -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.accepts_jobs = False
        assert await pool.load(CHAIN) == 0
        assert await pool.save(CHAIN) == len(CHAIN)
        pool.tier.accepts_jobs = True
        assert await pool.load(OTHER) == len(OTHER)

    in_pool(check)


def test_an_unknown_completion_is_reported_and_changes_nothing() -> None:
    async def check(pool: TieredPool) -> None:
        assert await pool.load(CHAIN) == len(CHAIN)
        (link,) = pool.pool._tiering.lower
        pool.tier.fault_of = lambda _kind, _key: Fault.WITHHELD
        assert await pool.load(OTHER, is_patient=False) == 0
        await pool.until_moved(lambda: pool.tier.withheld == len(OTHER))
        pool.tier.repeat_withheld()
        await pool.until_moved(lambda: not moving(pool))
        assert link.verify() == [f"memory: {len(OTHER)} reports were nobody's"]
        assert await pool.load(OTHER) == len(OTHER)
        link._jobs.strays = 0

    in_pool(check)


@pytest.mark.parametrize("fault", [Fault.UNLANDED, Fault.DISORDERED])
def test_a_chunk_whose_extents_have_not_landed_is_a_miss_whatever_the_tier_reports(fault: Fault) -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.fault_of = lambda kind, key: fault if kind == "read" and key == CHAIN[3] else Fault.NONE
        assert await pool.load(CHAIN) == 3
        await pool.until_moved(lambda: not moving(pool))
        pool.tier.fault_of = lambda _kind, _key: Fault.NONE
        assert await pool.load(CHAIN) == len(CHAIN), "the tier has it still"

    in_pool(check)


def test_a_lost_job_is_named_and_holds_up_no_save_and_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pool: TieredPool) -> None:
        (link,) = pool.pool._tiering.lower
        pool.tier.fault_of = lambda _kind, _key: Fault.WITHHELD
        assert await pool.load(CHAIN, is_patient=False) == 0
        await pool.until_moved(lambda: pool.tier.withheld == len(CHAIN))
        assert not link.has_lost_job
        assert link.can_take
        monkeypatch.setattr("kvpool.tiering.link.LOST_S", 0.0)
        assert link.has_lost_job
        assert not link.can_take
        assert not link.make_room()
        assert [line.partition(" for ")[0] for line in link.verify()] == ["memory: a job has had no report"]
        assert (await pool.pool.demote_all(MOVED_S))["left"] == 0
        pool.tier.release_withheld()
        await pool.until_moved(lambda: not moving(pool))
        assert not link.has_lost_job

    in_pool(check)


def test_a_leased_chain_that_found_no_room_is_demoted_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        pool = TieredPool([medium_of(100)], 4 * DRAM_CHUNKS)
        await pool.start()
        leases = []
        for chain in (CHAIN, OTHER):
            assert await pool.save(chain) == len(chain)
            leased = await pool.serve(pool.pool.chains.acquire(pool.session, m.Acquire(b"".join(chain))))
            leases.append(leased.lease)
        writes: list[Moves] = []
        started = pool.tier.write

        def write(namespace: Namespace, moves: Moves) -> JobId:
            writes.append(moves)
            return NOT_STARTED if len(writes) == 2 else started(namespace, moves)

        monkeypatch.setattr(pool.tier, "write", write)
        report = await pool.pool.demote_all(MOVED_S)
        assert len(writes) > 2
        assert (report["left"], report["durable"]) == (0, True)
        for lease in leases:
            pool.pool.leases.release(pool.session, lease)
        await pool.stop()

    asyncio.run(run())


def test_a_check_that_fails_without_a_word_is_reported() -> None:
    async def check(pool: TieredPool) -> None:
        pool.tier.fault_of = lambda kind, key: Fault.ERROR if kind == "check" and key == OTHER[7] else Fault.NONE
        assert await deep_check(pool) == [{"tier": "memory", "key": OTHER[7].hex(), "fault": "failed", "dropped": 0}]
        assert await pool.load(OTHER) == len(OTHER)

    in_pool(check)


def test_a_restart_finds_the_stored_chunks_and_their_priorities() -> None:
    medium = medium_of(100)

    async def check(pool: TieredPool) -> None:
        kept = await pool.serve(pool.pool.hints.retain(pool.session, m.Retain(CHAIN[0], bytes([70]), bytes(4))))
        assert kept.states == bytes([RetainState.ACCEPTED])

    in_pool(check, medium)
    rows = set(medium.rows)
    assert rows == {*CHAIN, *OTHER}

    async def next_life() -> None:
        pool = TieredPool([medium], DRAM_CHUNKS)
        await pool.start()
        assert [pool.tier.slots.directory.retention(key) for key in CHAIN[:2]] == [(70, 0), (DEFAULT_PRIORITY, 0)]
        assert await pool.load(CHAIN) == len(CHAIN)
        assert await pool.load(OTHER) == len(OTHER)
        await pool.flush()
        await pool.stop()

    asyncio.run(next_life())
    assert medium.rows == {}, "what an operator has dropped stays dropped"
