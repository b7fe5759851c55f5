"""Former writers: slots of a former life are withheld until whoever may write to them is proven to have stopped."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvpool.index.holders import Holder, Process, joint_holder, process_of, unknown_holder
from kvpool.pool import former_writers as module
from kvpool.pool.former_writers import DAEMON, SEVERAL, FormerWriters

USER = 1000
HERE = process_of(os.getpid())
UNSEEN = Process(0)
# What stands for connections of the life before that wrote together.
JOINT = 100


def proof_of(number: int) -> bytes:
    return bytes([number]) * 16


@dataclass(frozen=True, slots=True)
class Share:
    """See `WithheldShare`."""

    holder: int
    slots: int
    bytes: int


class Slots:
    """Withheld slots by holder, of 10 bytes each."""

    def __init__(self, slots: dict[int, int]) -> None:
        self.slots = slots

    def withheld(self) -> "list[Share]":
        """See `Withholding`."""
        return [Share(holder, slots, 10 * slots) for holder, slots in sorted(self.slots.items())]

    def release_withheld(self, holder: int) -> int:
        """See `Withholding`."""
        return self.slots.pop(holder, 0)

    def rename_withheld(self, holder: int, instead: int) -> None:
        """See `Withholding`."""
        if holder in self.slots:
            self.slots[instead] = self.slots.get(instead, 0) + self.slots.pop(holder)


class World:
    """Former writers over slots; what they forget and how often they have made room."""

    def __init__(
        self, slots: dict[int, int], processes: dict[int, Process], *, unknown: int = 0, before: int = 1, joint: int = 0
    ) -> None:
        """`unknown`: the number of the unknown holder that a damaged book has; 0: it is whole. `before`: the first connection
        of the life before; `joint`: the number of what stands for those of an earlier one together."""
        self.slots = Slots(slots)
        self.forgotten: list[int] = []
        self.rooms = 0
        self.writers = FormerWriters(
            self.slots,
            [
                *(Holder(number, process, proof_of(number), USER) for number, process in processes.items()),
                *([unknown_holder(unknown)] if unknown else []),
                *([joint_holder(joint, first=1)] if joint else []),
                joint_holder(JOINT, first=before),
            ],
            forget=self._forget,
            on_room=self._note_room,
        )

    def _note_room(self) -> None:
        self.rooms += 1

    def _forget(self, number: int) -> None:
        if number != JOINT:
            self.forgotten.append(number)


@contextmanager
def running() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is killed."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_slots_of_a_process_that_runs_are_withheld() -> None:
    world = World({5: 3}, {5: HERE})
    assert world.writers.report() == {
        "dram_withheld_slots": 3,
        "dram_withheld_bytes": 30,
        "dram_former_writers": 1,
    }
    assert world.forgotten == []
    assert world.writers.verify() == []


def test_what_the_former_daemon_wrote_itself_is_free_at_once() -> None:
    world = World({DAEMON: 2}, {5: HERE})
    assert world.slots.slots == {}
    assert world.forgotten == [5], "it holds nothing back"
    assert world.writers.report() == {}


def test_a_process_that_has_ended_writes_no_more_reaped_or_not() -> None:
    with running() as reaped, running() as zombie:
        processes = {1: process_of(reaped.pid), 2: process_of(zombie.pid), 3: HERE}
        reaped.kill()
        reaped.wait()
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        world = World({1: 1, 2: 1, 3: 1}, processes)
        assert world.slots.slots == {3: 1}
        assert sorted(world.forgotten) == [1, 2]


def test_a_number_that_another_process_has_now_is_no_writer() -> None:
    world = World({1: 1}, {1: Process(HERE.pid, HERE.start - 1)})
    assert world.slots.slots == {}


def test_a_process_whose_start_is_hidden_may_run_still() -> None:
    world = World({1: 1}, {1: Process(HERE.pid)})
    assert world.slots.slots == {1: 1}


@pytest.mark.parametrize("process", [HERE, UNSEEN], ids=["seen", "unseen"])
@pytest.mark.parametrize("other", ["proof", "short", "none", "number", "pid", "user"])
def test_nobody_speaks_for_another_process(other: str, process: Process) -> None:
    world = World({5: 3}, {5: process, 6: process})
    proofs = {"proof": proof_of(6), "short": proof_of(5)[:15], "none": b""}
    world.writers.note_return(
        [(6 if other == "number" else 5, proofs.get(other, proof_of(5)))],
        pid=process.pid + (other == "pid"),
        user=USER + (other == "user"),
    )
    assert world.slots.slots == {5: 3}
    assert world.rooms == 0


def test_a_process_that_cannot_be_seen_has_not_ended_and_frees_its_own_by_its_return_alone() -> None:
    world = World({1: 2, 2: 3, SEVERAL: 4}, {1: UNSEEN, 2: UNSEEN})
    assert world.slots.slots == {1: 2, 2: 3, JOINT: 4}
    assert world.writers.report()["dram_withheld_for"] == (
        "9 of processes in another PID namespace: whether they have ended is not seen, their return frees them"
    )
    world.writers.note_return([(1, proof_of(1))], pid=0, user=USER)
    assert world.slots.slots == {2: 3, JOINT: 4}
    world.writers.note_return([(2, proof_of(2))], pid=0, user=USER)
    assert (world.slots.slots, world.writers.report()) == ({}, {})


def test_a_client_that_is_back_frees_what_it_wrote_alone() -> None:
    world = World({5: 3, 7: 1}, {5: HERE, 7: HERE})
    world.writers.note_return([(5, proof_of(5))], pid=HERE.pid, user=USER)
    assert (world.slots.slots, world.forgotten, world.rooms) == ({7: 1}, [5], 1)
    world.writers.note_return([(5, proof_of(5))], pid=HERE.pid, user=USER)
    assert world.rooms == 1, "once"
    world.writers.note_return([(7, proof_of(7))], pid=HERE.pid, user=USER)
    assert (world.slots.slots, sorted(world.forgotten), world.rooms) == ({}, [5, 7], 2)
    assert world.writers.verify() == []


def test_what_one_life_wrote_together_waits_for_writers_of_that_life_alone() -> None:
    # Connections 1 to 9 were of a life, 10 was given to what they wrote together; 11 on were of the next one.
    world = World({5: 1, 10: 4, SEVERAL: 2}, {5: HERE}, before=11, joint=10)
    assert world.slots.slots == {5: 1, 10: 4}
    world.writers.note_return([(5, proof_of(5))], pid=HERE.pid, user=USER)
    assert world.slots.slots == {}
    later = World({12: 1, 10: 4, SEVERAL: 2}, {12: HERE}, before=11, joint=10)
    assert later.slots.slots == {12: 1, JOINT: 2}
    assert later.writers.verify() == []


def test_connections_are_named_together() -> None:
    world = World({5: 3, 7: 1, 9: 2}, {5: HERE, 7: HERE, 9: HERE})
    named = [(4, proof_of(4)), (5, proof_of(5)), (7, proof_of(6)), (9, proof_of(9))]
    world.writers.note_return(named, pid=HERE.pid, user=USER)
    assert (world.slots.slots, sorted(world.forgotten), world.rooms) == ({7: 1}, [5, 9], 1)


def test_what_several_wrote_is_free_when_the_last_writer_has_stopped() -> None:
    world = World({SEVERAL: 4}, {5: HERE, 7: HERE})
    world.writers.note_return([(5, proof_of(5))], pid=HERE.pid, user=USER)
    assert (world.slots.slots, world.rooms) == ({JOINT: 4}, 0)
    world.writers.note_return([(7, proof_of(7))], pid=HERE.pid, user=USER)
    assert (world.slots.slots, world.rooms) == ({}, 1)


def test_a_writer_that_no_book_has_had_ended_unless_the_book_is_damaged() -> None:
    assert World({9: 1, SEVERAL: 1}, {}).slots.slots == {}
    damaged = World({9: 1, 5: 1, SEVERAL: 1}, {5: HERE}, unknown=11)
    damaged.writers.note_return([(5, proof_of(5))], pid=HERE.pid, user=USER)
    assert damaged.slots.slots == {9: 1, JOINT: 1}
    assert damaged.forgotten == [5], "the unknown one goes on into the next book"
    why = "for good, since a damaged book does not name who wrote them: a start without kept memory frees them"
    assert damaged.writers.verify() == [f"former writers: 2 slots are withheld {why}"]
    assert damaged.writers.report() == {
        "dram_withheld_slots": 2,
        "dram_withheld_bytes": 20,
        "dram_former_writers": 0,
        "dram_withheld_for": f"2 {why}",
    }


@pytest.mark.parametrize("slots", [{}, {5: 1}, {DAEMON: 1}])
def test_an_unknown_writer_is_forgotten_where_nothing_is_withheld_for_it(slots: dict[int, int]) -> None:
    world = World(slots, {5: HERE}, unknown=11)
    assert 11 in world.forgotten
    assert world.writers.verify() == []


def test_nobody_speaks_for_an_unknown_writer() -> None:
    world = World({11: 1, SEVERAL: 1}, {}, unknown=11)
    for user in (0, USER):
        world.writers.note_return([(11, bytes(16))], pid=0, user=user)
    assert world.slots.slots == {11: 1, JOINT: 1}


def test_a_look_finds_each_process_that_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "LOOKED_AT_ONCE", 2)

    async def run() -> World:
        with running() as first, running() as last:
            processes = {1: process_of(first.pid), 2: HERE, 3: HERE, 4: HERE, 5: process_of(last.pid)}
            world = World(dict.fromkeys(processes, 1), processes)
            world.writers.start()
            for process in (first, last):
                process.kill()
                process.wait()
            while len(world.slots.slots) > 3:
                await asyncio.sleep(0)
            world.writers.cancel()
        return world

    world = asyncio.run(run())
    assert sorted(world.slots.slots) == [2, 3, 4]
    assert sorted(world.forgotten) == [1, 5]
    assert world.rooms == 2
