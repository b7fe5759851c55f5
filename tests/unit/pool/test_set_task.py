"""Sets that are leased part by part: what one part and the last turn cost, and which keys are tried while some have to wait."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import PART_CHUNKS, Step
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.pool import Pool
from kvpool.pool.readers.set_task import SOUGHT_AT_ONCE, SetTask
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from kvpool.tiering.promotions import Wanted
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.remote import Asker
from tests.hostile.rigs.raw_clients import keys_of
from tests.rigs.daemon import SMALL
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_alone
from tests.unit.pool.test_acquire_task import ZERO_SUM

SET = 5 * PART_CHUNKS + 1
KEYS = keys_of(0, SET)
NOW_NS = 1


class CountedDirectory:
    """A directory that counts calls."""

    def __init__(self, directory: kvpool_native.Directory) -> None:
        self._directory = directory
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name] += 1
        return cast("Callable[..., Any]", getattr(self._directory, name))

    def as_native(self) -> kvpool_native.Directory:
        """It, as what a task takes."""
        return cast("kvpool_native.Directory", self)


class Setting:
    """A pool that has the first `stored` keys of a set, and an engine."""

    def __init__(self, stored: int) -> None:
        wanted = [f"dram.capacity={2 * SET * SMALL.chunk_bytes}B", "dram.prefault=false", "dram.connection_quota=1.0"]
        self.pool = Pool(load_config(None, [*wanted, "dram.announced_quota=1.0"]), MonotonicClock())
        self.stored = stored
        self.session: EngineSession

    async def start(self) -> None:
        """Store them."""
        await self.pool.start()
        self.session = self.pool.open_session(ConnectionId(7), "model", SMALL)
        if self.stored:
            keys = KEYS[: self.stored * KEY_BYTES]
            made = served(self.pool.chains.reserve(self.session, reserve_alone(0, keys)))
            sums = ZERO_SUM.to_bytes(4, "little") * SMALL.extents * self.stored
            served(self.pool.chains.commit(self.session, m.Commit(made.reservation, sums, b"")))

    def begin(
        self, directory: kvpool_native.Directory | None = None, keys: bytes = KEYS, tiering: Tiering | None = None
    ) -> SetTask:
        """A task for them."""
        readers = self.pool.chains.readers
        used = directory or self.pool._directory
        return SetTask(used, tiering or self.pool._tiering, self.session, KeyColumn(keys), ending=readers.ending)

    def drop(self, number: int) -> None:
        """The bytes of a chunk were found bad."""
        key = KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES]
        assert self.pool._directory.drop(key, self.pool._directory.place_of(key)[1])


def in_pool(check: Callable[[Setting], None], stored: int = SET) -> None:
    async def run() -> None:
        setting = Setting(stored)
        await setting.start()
        check(setting)
        assert setting.pool.verify()["problems"] == []
        await setting.pool.stop()

    asyncio.run(run())


def test_the_last_turn_takes_as_many_calls_for_thousands_of_keys_as_for_one() -> None:
    def check(setting: Setting) -> None:
        for count in (1, SET):
            directory = CountedDirectory(setting.pool._directory)
            task = setting.begin(directory.as_native(), KEYS[: count * KEY_BYTES])
            assert not directory.calls, "nothing is looked for before the first part"
            while task.advance(NOW_NS, may_wait=True) is not Step.DONE:
                assert directory.calls.total() <= PART_CHUNKS
                directory.calls.clear()
            assert not directory.calls, "the turn that grants looks for nothing"
            holds, places = task.take_holds(NOW_NS)
            assert directory.calls.total() <= 2
            assert places == list(range(count))[::-1]
            task.release_holds(NOW_NS)
            setting.pool.chains.readers.ending.release_holds(holds[0], NOW_NS)

    in_pool(check)


def test_what_was_dropped_before_the_last_turn_is_absent_and_the_others_have_their_own_rows() -> None:
    dropped = (0, PART_CHUNKS + 3)

    def check(setting: Setting) -> None:
        parts = setting.pool.chains.acquire(setting.session, m.Acquire(KEYS, set_of=1))
        for _ in range(3):
            next(parts)
        for number in dropped:
            setting.drop(number)
        leased = served(parts)
        assert leased.chunks == SET - len(dropped)
        assert [number for number in range(SET) if leased.tiers[number] == m.NO_LEVEL] == list(dropped)
        for number in (1, PART_CHUNKS, SET - 1):
            key = KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            at = slice(8 * number, 8 * number + 8)
            row = (int.from_bytes(leased.offsets[at], "little"), int.from_bytes(leased.generations[at], "little"))
            assert row == setting.pool._directory.place_of(key)
        assert leased.offsets[:8] == leased.generations[:8] == leased.slots[:8] == bytes(8)
        setting.pool.leases.release(setting.session, leased.lease)

    in_pool(check)


def test_a_key_that_is_named_twice_is_held_where_it_is_named_first_even_in_another_part() -> None:
    keys = KEYS[: (PART_CHUNKS + 2) * KEY_BYTES] + KEYS[: 2 * KEY_BYTES]

    def check(setting: Setting) -> None:
        leased = served(setting.pool.chains.acquire(setting.session, m.Acquire(keys, set_of=1)))
        assert leased.chunks == PART_CHUNKS + 2
        assert leased.tiers == bytes([Level.DRAM]) * (PART_CHUNKS + 2) + bytes([m.NO_LEVEL]) * 2
        setting.pool.leases.release(setting.session, leased.lease)

    in_pool(check)


def test_a_request_that_is_given_up_after_its_lease_was_granted_leaves_none() -> None:
    def check(setting: Setting) -> None:
        readers = setting.pool.chains.readers
        parts = setting.pool.chains.acquire(setting.session, m.Acquire(KEYS, set_of=1))
        while not readers.leases:
            next(parts)
        parts.close()
        assert readers.leases == 0
        assert readers.find(setting.session, 1) is None

    in_pool(check)


class FakeTiers:
    """Tiers that have every key that is looked for, and no room for it while it is among `blocked`; else they have lost it."""

    remotes = ()

    def __init__(self, *blocked: bytes) -> None:
        self.blocked = set(blocked)
        self.tried: list[bytes] = []
        self.kept: list[bytes] = []

    def keep_each(self, _: Namespace, keys: KeyColumn) -> list[Callable[[], None]]:
        """See `Tiering`."""
        self.kept += keys
        return [self.kept.clear]

    def bring_each(self, wanted: Wanted, asker: Asker | None) -> set[int]:
        """See `Tiering`."""
        assert asker is None
        self.tried += wanted.keys
        return {number for number, key in enumerate(wanted.keys) if key in self.blocked}


def _until_it_waits(task: SetTask, *, may_wait: bool = True) -> Step:
    while (step := task.advance(NOW_NS, may_wait=may_wait)) is Step.MORE:
        pass
    return step


def test_what_waits_is_passed_over_and_tried_again_part_by_part_and_at_last_as_a_whole() -> None:
    count = 3 * SOUGHT_AT_ONCE
    keys = [KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES] for number in range(count)]
    blocked = [keys[0], *keys[-2 * SOUGHT_AT_ONCE :]]
    tiers = FakeTiers(*blocked)

    def check(setting: Setting) -> None:
        task = setting.begin(keys=b"".join(keys), tiering=cast("Tiering", tiers))
        assert _until_it_waits(task) is Step.WAIT
        assert tiers.tried == keys, "each once"
        tiers.tried.clear()
        assert _until_it_waits(task) is Step.WAIT
        assert tiers.tried == blocked[:SOUGHT_AT_ONCE], "no more than a part, where it finds no room"
        tiers.tried.clear()
        tiers.blocked.remove(blocked[SOUGHT_AT_ONCE])
        assert _until_it_waits(task) is Step.WAIT
        assert tiers.tried[:SOUGHT_AT_ONCE] == blocked[SOUGHT_AT_ONCE : 2 * SOUGHT_AT_ONCE], "others than before"
        assert len(tiers.tried) == 2 * SOUGHT_AT_ONCE, "and more where some could be served"
        tiers.tried.clear()
        assert _until_it_waits(task, may_wait=False) is Step.DONE
        assert sorted(tiers.tried) == sorted(tiers.blocked), "each once more"
        assert task.take_holds(NOW_NS) == ({}, [])
        assert tiers.kept == keys
        task.release_holds(NOW_NS)
        assert not tiers.kept

    in_pool(check, stored=0)
