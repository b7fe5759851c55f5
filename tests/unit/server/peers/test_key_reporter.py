"""Key reporter over a journal of real directories: changes, waits, gaps, pages, and many that ask at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import pytest_asyncio

from kvpool.key_column import KeyColumn
from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.control.pullers import Puller
from kvpool.server.peers import key_reporter, save_notes
from kvpool.server.peers.key_reporter import KeyReporter
from tests.rigs.events.journal_rig import Rig, key
from tests.rigs.nodes.peers import until

pytestmark = pytest.mark.asyncio


@dataclass
class Desk:
    """A reporter on the running loop, and the answers that it gave, by connection."""

    rig: Rig
    answers: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rig.journal.watch(asyncio.get_running_loop())
        self.reporter = KeyReporter(self.rig.journal, asyncio.get_running_loop())

    def ask(self, ask: r.AskFollow, number: int = 1) -> None:
        def answer(found: Any) -> bool:
            self.answers.setdefault(number, []).append(found)
            return True

        puller = Puller("puller", bytes(16), "", number)
        if isinstance(ask, r.AskKeys):
            self.reporter.keys(puller, ask, answer)
        else:
            self.reporter.changes(puller, ask, answer)

    async def answer(self, ask: r.AskFollow, number: int = 1) -> Any:
        self.ask(ask, number)
        await until(lambda: self.answers.get(number), "it is answered")
        return self.answers.pop(number)[0]

    def close(self) -> None:
        self.reporter.close()
        self.rig.journal.close()


@pytest_asyncio.fixture
async def desks() -> AsyncIterator[list[Desk]]:
    made: list[Desk] = []
    yield made
    for desk in made:
        desk.close()


def keys_in(packed: bytes) -> set[bytes]:
    return set(KeyColumn(packed))


async def test_copies_in_a_device_are_no_news_for_other_nodes(desks: list[Desk]) -> None:
    rig = Rig(has_device=True)
    desks.append(desk := Desk(rig))
    rig.store([1, 2])
    first = await desk.answer(r.AskChanges(-1, 10_000, 0))
    desk.ask(r.AskChanges(first.last, 30_000, 0), 2)
    assert rig.copy([1, 2]) == 2
    found = await desk.answer(r.AskChanges(first.last, 0, 0))
    assert (found.last, found.stored, found.removed) == (rig.journal.newest, b"", b"")
    assert found.last == first.last + 2
    await until(lambda: "1 wait" in repr(desk.reporter), "the other one still waits")
    assert keys_in((await desk.answer(r.AskKeys(0))).keys) == {key([1]), key([1, 2])}


async def test_a_request_without_news_waits_for_an_event_or_its_end(desks: list[Desk]) -> None:
    rig = Rig()
    desks.append(desk := Desk(rig))
    first = await desk.answer(r.AskChanges(-1, 0, 0))
    nothing = await desk.answer(r.AskChanges(first.last, 1, 0))
    assert (nothing.last, nothing.newest, nothing.stored, nothing.is_gap) == (first.last, first.last, b"", False)
    for number in range(1, 6):
        desk.ask(r.AskChanges(first.last, 30_000, 0), number)
    await until(lambda: "5 wait" in repr(desk.reporter), "all wait")
    assert desk.answers == {}
    desk.reporter.forget(Puller("puller", bytes(16), "", 5))
    rig.store([1])
    await until(lambda: len(desk.answers) == 4, "all that still wait are answered")
    assert {answer.stored for (answer,) in desk.answers.values()} == {key([1])}
    assert desk.reporter.stats() == {"answers": 6, "gaps": 0, "pages": 0, "waiting": 0}


class Turns:
    """In a loop's place: what a reporter has called later, until the test runs it."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, call: Callable[[], None]) -> Mock:
        self.later.append(call)
        return Mock()

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: int) -> Mock:
        if delay_s < 1:  # a pause, no end of a wait
            self.later.append(partial(call, *arguments))
        return Mock()

    def run(self) -> None:
        (turn,) = self.later
        self.later = []
        turn()


async def test_a_request_that_finds_news_begins_no_second_turn_for_who_waits() -> None:
    rig, turns, answered = Rig(), Turns(), list[int]()
    reporter = KeyReporter(rig.journal, cast(asyncio.AbstractEventLoop, turns))

    def ask(number: int) -> None:
        def answer(_: Any) -> bool:
            answered.append(number)
            return True

        reporter.changes(Puller("puller", bytes(16), "", number), r.AskChanges(rig.journal.newest, 30_000, 0), answer)

    ask(1)
    turns.run()
    ask(2)
    rig.store([1])  # nobody has looked for it yet
    turns.run()
    for _ in answered:
        turns.run()
    assert (answered, turns.later) == ([2, 1], []), "one after the other"
    reporter.close()
    rig.journal.close()


async def test_one_request_is_answered_in_a_turn(desks: list[Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_reporter, "PAUSE_S", 0.0)
    desks.append(desk := Desk(Rig()))
    for number in range(20):
        desk.ask(r.AskKeys(0), number)
    most = 0
    while len(desk.answers) < 20:
        before = len(desk.answers)
        await asyncio.sleep(0)
        most = max(most, len(desk.answers) - before)
    assert most == 1


async def test_lost_events_are_a_gap_without_keys(desks: list[Desk]) -> None:
    rig = Rig(buffer="64KiB")
    desks.append(desk := Desk(rig))
    for name in range(300):
        rig.store([name, 1, 2, 3])
        rig.journal.take_changes()
    gap = await desk.answer(r.AskChanges(0, 10_000, 0))
    assert (gap.is_gap, gap.stored, gap.removed) == (True, b"", b"")
    assert (await desk.answer(r.AskChanges(gap.newest + 5, 10_000, 0))).is_gap
    assert desk.reporter.stats()["gaps"] == 2


async def test_an_answer_is_bounded_and_the_next_goes_on(desks: list[Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r, "FOLLOW_KEYS_MAX", 5)
    rig = Rig()
    desks.append(desk := Desk(rig))
    for name in range(6):
        rig.store([name, 1])
    last, known = -1, set()
    while True:
        found = await desk.answer(r.AskChanges(last, 0, 0))
        assert len(KeyColumn(found.stored)) <= 4
        wire.check_follow(r.AskChanges(last, 0, 0), found)
        if found.last == last:
            break
        last = found.last
        known |= keys_in(found.stored)
    assert known == set(rig.truth())


async def test_a_page_is_asked_for_again_while_the_log_is_behind(
    desks: list[Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", 2)
    rig = Rig()
    rig.store([1, 2, 3, 4, 5])
    assert rig.journal.keys(0, 100) == (KeyColumn(b""), rig.journal.newest, 0)
    rig.journal.take_changes()
    keys, as_of, cursor = rig.journal.keys(0, 100)
    assert (set(keys), as_of) == (set(rig.truth()), rig.journal.newest)
    assert cursor == 1 << 32


async def test_saves_under_way_are_reported_and_those_given_up_are_removed(desks: list[Desk]) -> None:
    rig = Rig()
    desks.append(desk := Desk(rig))
    first = await desk.answer(r.AskChanges(-1, 0, 0))
    desk.ask(r.AskChanges(first.last, 30_000, 0))
    await until(lambda: "1 wait" in repr(desk.reporter), "it waits")
    save = KeyColumn(key([1]) + key([1, 2]) + key([1, 2, 3]))
    desk.reporter.note_save(save)
    await until(lambda: 1 in desk.answers, "the save is reported at once")
    (found,) = desk.answers.pop(1)
    wire.check_follow(r.AskChanges(first.last, 30_000, 0), found)
    assert (keys_in(found.stored), found.removed, found.last) == (set(save), b"", first.last)
    again = await desk.answer(r.AskChanges(first.last, 1, 0), 2)
    assert again == found, "another connection, or the same after an answer that was lost"
    nothing = await desk.answer(r.AskChanges(first.last, 1, found.saves))
    assert (nothing.stored, nothing.removed, nothing.saves) == (b"", b"", found.saves)
    rig.store([1])
    desk.reporter.end_save(save, 1)
    lost = await desk.answer(r.AskChanges(first.last, 30_000, found.saves), 3)
    assert (keys_in(lost.stored), keys_in(lost.removed)) == ({key([1])}, {key([1, 2]), key([1, 2, 3])})
    newcomer = await desk.answer(r.AskChanges(lost.last, 1, 0), 4)
    assert (newcomer.stored, newcomer.removed) == (b"", b"")  # it knew of none of them


async def test_notes_of_saves_that_were_dropped_are_a_gap(desks: list[Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_notes, "NOTES_MAX", 8)
    rig = Rig()
    desks.append(desk := Desk(rig))
    saves = [key([7, number]) for number in range(20)]
    desk.reporter.note_save(KeyColumn(b"".join(saves[:1])))
    known = await desk.answer(r.AskChanges(-1, 0, 0))
    assert keys_in(known.stored) == set(saves[:1])
    desk.reporter.end_save(KeyColumn(b"".join(saves[:1])), 0)
    desk.reporter.note_save(KeyColumn(b"".join(saves[1:])))
    gap = await desk.answer(r.AskChanges(known.last, 10_000, known.saves))
    assert (gap.is_gap, gap.stored, gap.removed) == (True, b"", b"")
    assert desk.reporter.stats()["gaps"] == 1
    anew = await desk.answer(r.AskChanges(gap.last, 10_000, 0))
    assert keys_in(anew.stored) == set(saves[12:])
    rig.store([1])
    rig.journal.take_changes()
    rig.journal._log.open_gap()
    gap = await desk.answer(r.AskChanges(-1, 0, anew.saves))
    assert (gap.is_gap, gap.stored, gap.removed) == (True, b"", b"")
