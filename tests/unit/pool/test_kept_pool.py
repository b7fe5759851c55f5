"""Lives of a pool over one arena: what the next one finds, why it finds nothing, and a death at each step between them."""

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvpool.clock import MonotonicClock
from kvpool.ids import PROOF_BYTES, ConnectionId
from kvpool.index.holders import Process
from kvpool.keys import DOMAIN_TAG_BYTES
from kvpool.pool import pool as pools
from kvpool.states import Level
from kvpool.tiers.dram.kept import former, kept_memory
from kvpool.tiers.dram.kept.book import BookFull
from kvpool.tiers.dram.kept.keeper import ARENA, BOOK, LIFE_PAGE, name_of
from kvpool.tiers.dram.kept.kept_memory import KeptMemory
from kvpool.tiers.dram.kept.life_page import LifePage
from tests.rigs.tiers.memory_keeper import MemoryKeeper
from tests.rigs.tiers.memory_tier import Medium
from tests.rigs.tiers.tiered_pool import TieredPool, key_of, medium_of

GONE = Process(1 << 22, 1)
CHUNKS = 64
LIFE_MAX = (1 << 64) - 1
CHAIN = [key_of(number) for number in range(10)]
OTHER = [key_of(1, number) for number in range(7)]
DOMAIN = bytes(DOMAIN_TAG_BYTES)
PROOF = b"p" * PROOF_BYTES


class Death(BaseException):
    """The process of a life ends here."""


@pytest.fixture(autouse=True)
def _processes_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life's process has ended when the next one looks."""
    monkeypatch.setattr(kept_memory, "process_of", lambda _: GONE)


@pytest.fixture
def keeper() -> Iterator[MemoryKeeper]:
    """The keeper of all lives of a test."""
    made = MemoryKeeper()
    yield made
    made.fail_after = None
    made.close()


def _life(
    keeper: MemoryKeeper | None, *options: str, media: tuple[Medium, ...] = (), domain: bytes = DOMAIN, **why: str
) -> TieredPool:
    kept = KeptMemory(keeper, domain, MonotonicClock(), **why)
    return TieredPool(media, CHUNKS, *options, levels=[Level.SSD] * len(media), kept=kept)


def _run(life: TieredPool, during: Callable[[TieredPool], Awaitable[None]]) -> None:
    async def live() -> None:
        await life.start()
        await during(life)
        await life.stop()

    asyncio.run(live())


async def _save_both(life: TieredPool) -> None:
    assert await life.save(CHAIN) == len(CHAIN)
    assert await life.save(OTHER) == len(OTHER)


async def _has_both(life: TieredPool) -> None:
    assert await life.load(CHAIN) == len(CHAIN)
    assert await life.load(OTHER) == len(OTHER)


async def _has_none(life: TieredPool) -> None:
    assert await life.load(CHAIN) == 0
    assert await life.load(OTHER) == 0


def _began(life: TieredPool) -> str:
    return str(life.pool.info()["dram_began"])


def test_the_next_life_has_every_chunk_and_can_store_more(keeper: MemoryKeeper) -> None:
    _run(_life(keeper), _save_both)
    files = set(keeper.kept)
    assert files == {ARENA, LIFE_PAGE, "kvpool-index-1", "kvpool-records-1", "kvpool-book-1"}
    for number in range(2, 6):
        life = _life(keeper)
        more = [*CHAIN, *(key_of(number, further) for further in range(3))]

        async def use(life: TieredPool, more: list[bytes] = more) -> None:
            await _has_both(life)
            assert await life.save(more) == len(more)

        _run(life, use)
        assert set(keeper.kept) == {name.replace("-1", f"-{number}") for name in files}
        assert f"from life {number - 1}: " in _began(life)
        assert life.pool.info()["dram_kept_by"] == "memory"
        assert life.pool.life == number


class _NoPrefault:
    """Segments beyond the first one get their pages later than this test looks."""

    is_working = True
    failure = ""

    def __init__(self, *_: object) -> None:
        return

    def stop(self) -> None:
        """See `Prefault`."""


def test_nothing_is_evicted_for_want_of_segments_that_have_their_pages_since_the_life_before(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(life: TieredPool) -> None:
        for chain in range(12):
            await life.save([key_of(100 + chain, number) for number in range(10)])
        await life.flush()
        assert await life.save(CHAIN) == len(CHAIN)

    async def store_more(life: TieredPool) -> None:
        assert await life.save(OTHER) == len(OTHER)
        for chain in range(3):
            keys = [key_of(200 + chain, number) for number in range(10)]
            assert await life.save(keys) == len(keys)
        assert life.pool._directory.stats()["evicted_chunks"] == 0
        await _has_both(life)

    _run(_life(keeper), fill)
    monkeypatch.setattr(pools, "Prefault", _NoPrefault)
    _run(_life(keeper, "dram.prefault=true"), store_more)


def test_what_was_flushed_or_evicted_does_not_come_back(keeper: MemoryKeeper) -> None:
    async def fill(life: TieredPool) -> None:
        await _save_both(life)
        await life.flush()
        for chain in range(12):
            keys = [key_of(100 + chain, number) for number in range(10)]
            assert await life.save(keys) == 10

    async def look(life: TieredPool) -> None:
        await _has_none(life)
        found = [await life.load([key_of(100 + chain, number) for number in range(10)]) for chain in range(12)]
        assert sum(found) == counted[0]

    counted: list[int] = []
    first = _life(keeper)
    _run(first, fill)
    counted.append(first.pool._directory.stats()["chunks"])
    assert 40 < counted[0] <= CHUNKS
    _run(_life(keeper), look)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (f"dram.capacity={CHUNKS * 8}KiB", "dram.capacity was "),
        ("dram.segment=8KiB", "dram.segment was "),
        ("dram.max_chunks=100", "dram.max_chunks was "),
        ("dram.huge_pages=off", "dram.huge_pages was auto, and is off"),
        ("dram.numa=interleave", "dram.numa was default, and is interleave"),
    ],
)
def test_another_geometry_is_a_cold_start_that_frees_the_old_memory_first(
    keeper: MemoryKeeper, caplog: pytest.LogCaptureFixture, option: str, reason: str
) -> None:
    _run(_life(keeper), _save_both)
    keeper.calls.clear()
    caplog.set_level(logging.INFO)
    caplog.clear()
    life = _life(keeper, option)
    assert keeper.kept == {}
    assert keeper.calls[:1] == ["take"]
    _run(life, _has_none)
    assert reason in _began(life)
    lines = [record.getMessage() for record in caplog.records if "dram begins empty" in record.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0]
    assert len(keeper.kept) == 5
    assert name_of(BOOK, 2) in keeper.kept


def test_another_domain_is_a_cold_start_that_shows_neither(keeper: MemoryKeeper) -> None:
    _run(_life(keeper), _save_both)
    life = _life(keeper, domain=b"\1" * DOMAIN_TAG_BYTES)
    _run(life, _has_none)
    assert _began(life) == "empty: server.domain_secret_file is another one now"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("format", "format was "),
        ("the boot", "the boot was "),
        ("the daemon's uid", "the daemon's uid was "),
        ("the PID namespace", "the PID namespace was "),
        ("the format of keys", "the format of keys was "),
    ],
)
def test_other_terms_are_a_cold_start(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    _run(_life(keeper), _save_both)
    plain = former.terms_of
    monkeypatch.setattr(kept_memory, "terms_of", lambda *given: {**plain(*given), name: 4711})
    life = _life(keeper)
    _run(life, _has_none)
    assert reason in _began(life)


def test_a_daemon_that_has_not_ended_is_waited_for(keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    _run(_life(keeper), _save_both)
    monkeypatch.setattr(former, "ENDED_S", 0.01)
    life = _life(keeper)
    _run(life, _has_none)
    assert "has not ended within 0.01 s" in _began(life)


def test_lives_that_died_of_what_they_took_over_are_not_followed_for_ever(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(_life(keeper), _save_both)

    async def end_well(_: TieredPool) -> None:
        return

    with monkeypatch.context() as dying:
        dying.setattr("kvpool.pool.pool.take_over", lambda *_: _die())
        for _ in range(former.ATTEMPTS_MAX):
            with pytest.raises(Death):
                _run(_life(keeper), end_well)
            assert name_of(BOOK, 1) in keeper.kept
    life = _life(keeper)
    _run(life, _has_none)
    assert _began(life) == "empty: 3 lives have ended while they took it over"


def _die() -> None:
    raise Death


def test_starts_that_are_refused_or_ended_before_the_takeover_use_up_no_attempt(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(_life(keeper), _save_both)

    def end_by_signal(life: TieredPool) -> None:
        life.pool.kept.give_attempt_back()
        _die()

    for _ in range(2 * former.ATTEMPTS_MAX):
        _life(keeper)  # refused after its memory was looked at
        ended = _life(keeper)
        with monkeypatch.context() as dying:
            dying.setattr("kvpool.pool.pool.take_over", lambda *_, life=ended: end_by_signal(life))
            with pytest.raises(Death):
                _run(ended, _has_both)
    _run(_life(keeper), _has_both)


def test_a_start_that_is_refused_for_its_memory_drops_nothing(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(_life(keeper), _save_both)
    kept = set(keeper.kept)

    def refuse(*_: object, freed_bytes: int = 0, **__: object) -> None:
        assert freed_bytes > 0
        raise MemoryError("it cannot fit")

    with monkeypatch.context() as refusing:
        refusing.setattr("kvpool.pool.pool.check_memory_fits", refuse)
        with pytest.raises(MemoryError, match="it cannot fit"):
            _life(keeper, f"dram.capacity={CHUNKS * 8}KiB")
    assert set(keeper.kept) == kept
    _run(_life(keeper), _has_both)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE])
def test_no_room_to_map_it_is_no_fault_of_the_memory(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _run(_life(keeper), _save_both)
    with monkeypatch.context() as full:
        full.setattr(LifePage, "attach", lambda _: _raise_os_error(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            _life(keeper)
    _run(_life(keeper), _has_both)


def _raise_os_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("hidden", ["_BOOT_ID", "_PID_NAMESPACE"])
def test_a_hidden_proc_keeps_nothing_and_refuses_nothing(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, hidden: str
) -> None:
    _run(_life(keeper), _save_both)
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as hiding:
        hiding.setattr(former, hidden, tmp_path / "hidden")
        life = _life(keeper)
        _run(life, _has_none)
        assert "cannot be read" in str(life.pool.info()["dram_kept_by"])
        assert (life.pool.life, life.pool.is_kept) == (0, False)
    assert caplog.text.count("cannot be read") == 1
    assert keeper.kept == {}
    _run(_life(keeper), _has_none)


def test_a_distrusted_memory_is_not_taken_over(keeper: MemoryKeeper) -> None:
    _run(_life(keeper), _save_both)
    life = _life(keeper, why_cold="the last 5 lives ended early")
    _run(life, _has_none)
    assert _began(life) == "empty: the last 5 lives ended early"


def test_nobody_keeps_it_where_there_is_nobody(keeper: MemoryKeeper) -> None:
    life = _life(None, why_nobody="server.keep_memory is off")
    _run(life, _save_both)
    assert life.pool.info()["dram_kept_by"] == "nobody: server.keep_memory is off"
    assert (life.pool.life, life.pool.is_kept, life.pool.life_page) == (0, False, None)
    _run(_life(keeper), _has_none)


@pytest.mark.parametrize("step", range(1, 6))
def test_a_death_at_any_step_of_the_hand_over_leaves_a_whole_life(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    _run(_life(keeper), _save_both)
    reached = 0

    def reach(_: str) -> None:
        nonlocal reached
        reached += 1
        if reached == step:
            _die()

    async def nothing(_: TieredPool) -> None:
        return

    with monkeypatch.context() as dying:
        dying.setattr("kvpool.tiers.dram.kept.kept_memory.failpoint.reach", reach)
        with pytest.raises(Death):
            _run(_life(keeper), nothing)
    life = _life(keeper)
    expected = 1 if step <= 3 else 2
    assert f"from life {expected}: " in _began_after(life, _has_both)
    assert len(keeper.kept) == 5


def _began_after(life: TieredPool, during: Callable[[TieredPool], Awaitable[None]]) -> str:
    _run(life, during)
    return _began(life)


@pytest.mark.parametrize("calls", range(8))
def test_a_keeper_that_fails_at_any_call_costs_the_next_life_its_start_and_this_one_nothing(
    keeper: MemoryKeeper, caplog: pytest.LogCaptureFixture, calls: int
) -> None:
    _run(_life(keeper), _save_both)
    keeper.calls.clear()
    keeper.fail_after = calls
    life = _life(keeper)

    async def use(life: TieredPool) -> None:
        await life.save(OTHER)
        assert await life.load(OTHER) == len(OTHER)

    _run(life, use)
    keeper.fail_after = None
    is_kept = life.pool.info()["dram_kept_by"] == "memory"
    assert is_kept == (calls >= 5)
    after = _life(keeper)

    async def look(life: TieredPool) -> None:
        found = await life.load(OTHER)
        assert found == (len(OTHER) if is_kept or not calls else 0)  # who was not asked has the first life's still

    _run(after, look)
    assert is_kept or "dram is not kept" in caplog.text


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("calls", range(8))
def test_a_keeper_that_fails_at_a_start_is_followed_by_another_one_with_everything(
    keeper: MemoryKeeper, calls: int, is_followed: bool
) -> None:
    option = [] if is_followed else ["dram.segment=8KiB"]
    _run(_life(keeper), _save_both)
    keeper.has_another = True
    keeper.calls.clear()
    keeper.fail_after = calls
    life = _life(keeper, *option)

    async def use(life: TieredPool) -> None:
        if not life.pool.is_kept:
            assert life.pool.kept.can_be_kept
            assert keeper.kept == {}
            assert await life.pool.kept.give_again()
        await life.flush()
        await _has_none(life)
        assert await life.save(OTHER) == len(OTHER)

    _run(life, use)
    keeper.fail_after = None
    assert len(keeper.kept) == 5
    after = _life(keeper, *option)

    async def look(life: TieredPool) -> None:
        assert await life.load(CHAIN) == 0  # flushed, whoever had it
        assert await life.load(OTHER) == len(OTHER)

    _run(after, look)


def test_an_arena_that_a_later_life_has_changed_is_not_a_former_lifes(keeper: MemoryKeeper) -> None:
    _run(_life(keeper), _save_both)
    old = {name: descriptor for name, descriptor in keeper.take_memory().items() if name.endswith("-1")}
    _run(_life(keeper), _save_both)
    keeper.drop_memory([name for name in keeper.kept if name.endswith("-2")])
    for name, descriptor in old.items():
        keeper.give_memory(name, descriptor)
    life = _life(keeper)
    _run(life, _has_none)
    assert _began(life) == "empty: its life page names life 2, behind life 1"


@pytest.mark.parametrize("name", [ARENA, LIFE_PAGE, "kvpool-index-1", "kvpool-records-1", "kvpool-book-1"])
def test_a_file_that_is_missing_or_another_one_is_a_cold_start(keeper: MemoryKeeper, name: str) -> None:
    _run(_life(keeper), _save_both)
    swapped = "kvpool-records-1" if name != "kvpool-records-1" else "kvpool-index-1"
    other = keeper.take_memory()[swapped]
    keeper.drop_memory([name])
    first = _life(keeper)
    _run(first, _has_none)
    assert "empty: " in _began(first)
    keeper.close()
    _run(_life(keeper), _save_both)
    keeper.drop_memory([name])
    keeper.give_memory(name, other)
    second = _life(keeper)
    _run(second, _has_none)
    assert "empty: " in _began(second)
    assert len(keeper.kept) == 5


def test_a_book_that_is_full_ends_the_keeping_with_one_line(
    keeper: MemoryKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = _life(keeper)

    async def connect(life: TieredPool) -> None:
        await _save_both(life)
        monkeypatch.setattr("kvpool.tiers.dram.kept.book.Book.enter_holder", lambda *_: _raise_full())
        for number in (1, 2):
            life.pool.note_holder(ConnectionId(number), PROOF, pid=1, user=1)
        await _has_both(life)

    _run(life, connect)
    assert keeper.kept == {}
    assert caplog.text.count("dram is not kept") == 1
    assert not life.pool.is_kept
    assert "its book has no room" in str(life.pool.info()["dram_kept_by"])
    monkeypatch.undo()


def _raise_full() -> None:
    raise BookFull


def test_another_keeper_is_given_everything_again(keeper: MemoryKeeper) -> None:
    async def lose(life: TieredPool) -> None:
        await _save_both(life)
        keeper.close()
        life.pool.kept.note_lost("it was killed")
        assert not life.pool.is_kept
        assert await life.pool.kept.give_again()
        assert life.pool.is_kept

    _run(_life(keeper), lose)
    _run(_life(keeper), _has_both)


def test_what_is_dropped_at_a_stop_is_gone(keeper: MemoryKeeper) -> None:
    async def end(life: TieredPool) -> None:
        await _save_both(life)
        assert life.pool.kept.why_it_may_end(is_restart=True) == ""
        assert (
            life.pool.kept.why_it_may_end(is_restart=False)
            == "memory may not outlive this stop with it: it is no restart"
        )
        life.pool.kept.drop()
        assert life.pool.kept.why_it_may_end(is_restart=True).startswith("nobody keeps it")

    _run(_life(keeper), end)
    assert keeper.kept == {}


def test_numbers_of_connections_go_on_over_lives(keeper: MemoryKeeper) -> None:
    async def connect(life: TieredPool) -> None:
        life.pool.note_holder(ConnectionId(7), PROOF, pid=1, user=70)
        life.pool.note_holder(ConnectionId(9), PROOF, pid=2, user=71)
        life.pool.forget_holder(9)

    async def nothing(_: TieredPool) -> None:
        return

    _run(_life(keeper), connect)
    for first in (11, 12, 13):  # a number of each life is nobody's
        life = _life(keeper)
        _run(life, nothing)
        assert life.pool.first_connection == first


def _scribble(keeper: MemoryKeeper, number: int) -> None:
    os.pwrite(keeper.kept[LIFE_PAGE], number.to_bytes(8, "little"), 0)


@pytest.mark.parametrize("scribbled", [0, 7, LIFE_MAX])
def test_whoever_writes_the_life_page_while_a_life_begins_stops_nothing(keeper: MemoryKeeper, scribbled: int) -> None:
    _run(_life(keeper), _save_both)
    second = _life(keeper)
    _scribble(keeper, scribbled)
    _run(second, _has_both)
    assert second.pool.life_page is not None
    assert second.pool.life_page.number == second.pool.life == 2
    _run(_life(keeper), _has_both)


def test_a_life_page_of_a_later_life_is_a_cold_start_with_one_line(
    keeper: MemoryKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    _run(_life(keeper), _save_both)
    _scribble(keeper, LIFE_MAX)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        _run(_life(keeper), _has_none)
    (line,) = [record.getMessage() for record in caplog.records if "begins empty" in record.getMessage()]
    assert line == f"dram begins empty: its life page names life {LIFE_MAX}, behind life 1"
    _run(_life(keeper), _has_none)


def test_chunks_of_the_arena_and_below_are_known_in_both(keeper: MemoryKeeper) -> None:
    medium = medium_of(3 * CHUNKS)

    async def fill(life: TieredPool) -> None:
        assert await life.save(CHAIN) == len(CHAIN)
        assert await life.demote() == 0
        assert await life.save(OTHER) == len(OTHER)
        assert life.pool._directory.count_unsaved() == len(OTHER)

    async def go_on(life: TieredPool) -> None:
        assert f"from life 1: {len(CHAIN) + len(OTHER)} chunks" in _began(life)
        await life.until_moved(lambda: life.pool._directory.count_unsaved() == len(OTHER))
        await _has_both(life)
        assert life.pool._directory.stats()["chunks"] == len(CHAIN) + len(OTHER)
        assert await life.demote() == 0

    _run(_life(keeper, media=(medium,)), fill)
    _run(_life(keeper, media=(medium,)), go_on)
