"""The journal over real directories: events, gaps, snapshots, the chunk history. `tests/model` proves what they add up to."""

import asyncio
import os
import time
from itertools import pairwise

import numpy as np
import pytest

from kvpool.events import Cause, EventKind
from kvpool.ids import KEY_BYTES, NamespaceId
from kvpool.journal.chunk_history import ChunkHistory, Departure
from kvpool.journal.journal import CHANGES_PER_TURN
from kvpool.journal.snapshot_page import SNAPSHOT_END
from kvpool.key_column import KeyColumn
from kvpool.server.events.source import EventSource
from kvpool.states import Level, SaveState
from tests.rigs.events.journal_rig import DRAM, Rig, key, take_snapshot, tokens_of
from tests.rigs.events.readers import Replica
from tests.rigs.flushing import flush_whole


def test_chains_are_one_event_and_so_are_removals_and_these_come_before_the_next_store() -> None:
    rig = Rig()
    rig.store([1, 2, 3])
    rig.store([1, 2, 4])
    rig.store([5])
    rig.journal.take_changes()
    flush_whole(rig.memory, rig.tick())
    rig.store([6])
    created, *events = rig.journal.since(b"", -1).events
    assert (created.id, created.kind, created.capacities) == (0, EventKind.CREATED, (0, 400, 400, 0, 0))
    assert [(event.kind, len(event.chunks)) for event in events] == [
        (EventKind.STORED, 3),
        (EventKind.STORED, 1),
        (EventKind.STORED, 1),
        (EventKind.REMOVED, 5),
        (EventKind.STORED, 1),
    ]
    assert events[0].parent == b""
    assert events[1].parent == key([1, 2])
    assert events[0].tokens == tokens_of(1) + tokens_of(2) + tokens_of(3)
    assert (events[3].cause, events[3].tiers_before, events[3].level) == (Cause.FLUSHED, DRAM, None)
    assert (events[0].level, events[0].priority, events[0].namespace) == (Level.DRAM, 35, rig.namespace.id)


def test_a_full_buffer_drops_the_oldest_events_and_late_readers_meet_a_gap() -> None:
    rig = Rig(buffer="64KiB")
    for name in range(300):
        rig.store([name, 1, 2, 3])
        rig.journal.take_changes()
    follower = rig.journal.since(rig.epoch, -1)
    assert follower.is_gap
    assert follower.events == ()
    assert follower.last + 1 == rig.journal.stats()["events.written"]
    assert rig.journal.stats()["events.dropped"] > 0
    assert rig.journal.stats()["events.buffered_bytes"] <= 64 << 10
    replica = Replica()
    assert take_snapshot(rig, replica)
    assert replica.tiers() == rig.truth()
    assert rig.journal.verify() == []


def test_ids_of_another_life_and_of_the_future_are_gaps() -> None:
    rig = Rig()
    rig.store([1])
    assert rig.journal.since(os.urandom(16), 0).is_gap
    assert rig.journal.since(rig.epoch, 2).is_gap
    assert rig.journal.since(rig.epoch, -2).is_gap
    assert not rig.journal.since(rig.epoch, 1).is_gap


def test_a_snapshot_waits_until_the_log_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", 2)
    rig, replica = Rig(), Replica()
    rig.store([1, 2, 3, 4, 5])
    assert rig.journal.snapshot(0).chunks == ()
    assert rig.journal.snapshot(0).cursor == 0
    assert take_snapshot(rig, replica)
    assert replica.tiers() == rig.truth()


@pytest.mark.parametrize("cursor", [-1, -(2**40), 2 << 32, 2**62, 5 << 32 | 7])
def test_an_unknown_cursor_is_the_end(cursor: int) -> None:
    rig = Rig()
    rig.store([1])
    page = rig.journal.snapshot(cursor)
    assert page.chunks == ()
    assert page.cursor == SNAPSHOT_END


def test_every_end_of_a_chunk_is_in_the_history() -> None:
    rig = Rig(chunks=4)
    explain = rig.journal.explain
    assert explain(key([9])) == {"state": "unknown"}
    rig.store([1, 2])
    assert explain(key([1, 2])) == {
        "state": "stored", "tiers": ["dram"], "priority": 35, "model": "model", "has_parent": True
    }  # fmt: skip
    rig.drop(rig.memory, key([1, 2]))
    rig.journal.keep_up()
    rig.clock.advance(5)
    gone = {"state": "removed", "reason": "dropped", "tier": "dram", "priority": 35, "age_s": 5.0, "model": "model"}
    assert explain(key([1, 2])) == gone
    rig.store([3, 4, 5, 6])
    assert explain(key([1]))["reason"] == "own-class"
    flush_whole(rig.memory, rig.tick())
    assert explain(key([3]))["reason"] == "flushed"
    states = rig.store([1, 2, 3, 4, 5, 6])
    assert SaveState.FULL in states
    refused = explain(key([1, 2, 3, 4, 5]))
    assert (refused["state"], refused["reason"]) == ("declined", "full")
    assert explain(key([1, 2, 3, 4, 5, 6]))["reason"] == "no-parent"
    rig.store([1, 2])
    assert explain(key([1, 2]))["state"] == "stored"


def test_the_chunk_history_is_bounded_and_refusals_do_not_push_departures_out() -> None:
    rig = Rig(history_chunks="16")
    rig.store([1])
    rig.drop(rig.memory, key([1]))
    rig.journal.take_changes()
    for name in range(100):
        rig.journal.note_refusals(KeyColumn(key([name, 7])), bytes([SaveState.FULL]), NamespaceId(0))
    assert rig.journal.stats()["events.history_chunks"] == 17
    assert rig.journal.explain(key([1]))["state"] == "removed"
    assert rig.journal.explain(key([0, 7])) == {"state": "unknown"}
    rig.journal.note_refusals(KeyColumn(key([1]) * 100), bytes([SaveState.FULL]) * 100, NamespaceId(0))
    assert rig.journal.stats()["events.history_chunks"] == 17


def test_dropping_the_oldest_history_entry_costs_the_same_at_any_size() -> None:
    few, many = (_seconds_of_histories(count_max) for count_max in (256, 65_536))
    assert many < 8 * few, f"{many} s against {few} s"  # measured: 1.5 times as much; 21 times with a plain dict


def test_a_refused_save_costs_little_however_long_it_is() -> None:
    short, long = (_seconds_of_a_refusal(chunks) for chunks in (16, 28_000))
    assert long < 30 * short, f"{long} s against {short} s"


def _seconds_of_a_refusal(chunks: int) -> float:
    rig = Rig()
    keys, states = KeyColumn(bytes(KEY_BYTES * chunks)), bytes([SaveState.NO_PARENT]) * chunks
    best = float("inf")
    for _ in range(20):
        before = time.thread_time()
        rig.journal.note_refusals(keys, states, NamespaceId(0))
        best = min(best, time.thread_time() - before)
    return best


def _seconds_of_histories(count_max: int) -> float:
    history = ChunkHistory(count_max)
    departure = Departure(1, Cause.OWN_CLASS, Level.DRAM, 35, NamespaceId(0))
    keys = [number.to_bytes(32, "big") for number in range(count_max + 50_000)]
    history.note_departures(KeyColumn.of(keys[:count_max]), departure)
    columns = [KeyColumn(one) for one in keys[count_max:]]
    before = time.thread_time()
    for one in columns:
        history.note_departures(one, departure)
    elapsed = time.thread_time() - before
    assert len(history) == count_max
    assert history.departure(keys[-count_max - 1]) is None
    assert history.departure(keys[-count_max]) == departure
    return elapsed


def test_the_history_of_many_chunks_has_the_latest_of_each() -> None:
    history, keys = ChunkHistory(8), KeyColumn.of(number.to_bytes(32, "big") for number in range(12))
    first, second = (Departure(at, Cause.FLUSHED, Level.DRAM, 35, NamespaceId(0)) for at in (1, 2))
    assert [history.departure(one) for one in keys] == [None] * 12
    history.note_departures(keys[:8], first)
    history.note_departures(KeyColumn.of([keys[0], keys[8], keys[9]]), second)
    assert [history.departure(one) for one in keys] == [second, None, None, *[first] * 5, second, second, None, None]
    history.note_refusals(KeyColumn.of([keys[10], keys[0]]), [SaveState.FULL, SaveState.QUOTA], 3, NamespaceId(0))
    refused = [history.refusal(one) for one in keys]
    assert [one and one.state for one in refused] == [SaveState.QUOTA, *[None] * 9, SaveState.FULL, None]
    assert len(history) == 10
    history.note_departures(keys, second)
    assert [history.departure(one) for one in keys] == [*[None] * 4, *[second] * 8]
    history.clear()
    assert (len(history), history.departure(keys[11]), history.refusal(keys[0])) == (0, None, None)


def test_the_history_is_that_of_a_list_at_any_bound_and_any_number_at_once() -> None:
    random = np.random.default_rng(5)
    for count_max in (16, 17, 40):
        history, noted = ChunkHistory(count_max), list[tuple[bytes, Departure]]()
        for at_ns in range(60):
            chosen = [
                bytes(int(number).to_bytes(32, "big")) for number in random.integers(0, 50, random.integers(1, 60))
            ]
            departure = Departure(at_ns, Cause.FLUSHED, Level.DRAM, 35, NamespaceId(0))
            history.note_departures(KeyColumn.of(chosen), departure)
            noted = [*noted, *((one, departure) for one in chosen)][-count_max:]
            latest = dict(noted)
            assert len(history) == len(noted)
            names = (number.to_bytes(32, "big") for number in range(50))
            assert all(history.departure(one) == latest.get(one) for one in names)


def test_no_event_grows_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.journal.EVENT_PAYLOAD_BYTES_MAX", 7 * (32 + 32) + 63)
    rig = Rig()
    rig.store([1] * 20)
    stored = rig.journal.since(b"", -1).events[1:]
    assert [len(event.chunks) for event in stored] == [7, 7, 6]
    assert all(second.parent == first.chunks[-1] for first, second in pairwise(stored))
    assert rig.journal.verify() == []


def test_the_loop_takes_changes_by_itself_and_wakes_waiting_readers() -> None:
    rig, heard = Rig(), []
    rig.journal.listen(
        lambda: heard.append(rig.journal.stats()["events.written"]),
        lambda: {"events.heard": len(heard)},
        lambda: ["it is deaf"] if heard else [],
    )
    assert rig.journal.problems() == []

    async def run() -> None:
        rig.journal.watch(asyncio.get_running_loop())
        waiting = asyncio.ensure_future(rig.journal.wait_for_events(0, 20.0))
        await asyncio.sleep(0)
        rig.store([1, 2])
        await waiting
        assert heard == [2]
        assert rig.journal.stats()["events.heard"] == 1
        assert rig.journal.problems() == ["it is deaf"]
        await rig.journal.wait_for_events(0, 20.0)
        await rig.journal.wait_for_events(1, 0.001)
        late = asyncio.ensure_future(rig.journal.wait_for_events(1, 20.0))
        await asyncio.sleep(0)
        rig.journal.close()
        await late

    asyncio.run(run())


def test_waiting_readers_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.journal.WAITING_MAX", 2)
    rig = Rig()

    async def run() -> None:
        waiting = [asyncio.ensure_future(rig.journal.wait_for_events(0, 20.0)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.wait_for(rig.journal.wait_for_events(0, 20.0), 5.0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        third = asyncio.ensure_future(rig.journal.wait_for_events(0, 20.0))
        await asyncio.sleep(0)
        assert not third.done()
        rig.store([1])
        rig.journal.take_changes()
        await asyncio.gather(waiting[1], third)

    asyncio.run(run())


def test_a_flood_is_taken_turn_by_turn_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", 2)
    rig, turns = Rig(), 0

    async def run() -> None:
        nonlocal turns
        rig.journal.watch(asyncio.get_running_loop())
        rig.store([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        while rig.journal.stats()["events.written"] < 6:
            await asyncio.sleep(0)
            turns += 1
        rig.journal.close()

    asyncio.run(asyncio.wait_for(run(), 20.0))
    assert turns >= 5


def test_what_a_request_leaves_of_a_burst_is_recorded_without_another_change() -> None:
    """A request that may evict takes a part of the waiting changes, and the descriptor says nothing of the rest."""

    async def follow() -> tuple[int, int]:
        rig, loop = Rig(), asyncio.get_running_loop()
        source = EventSource(loop, rig.journal, rig.namespaces)
        rig.journal.watch(loop)
        last = (await asyncio.to_thread(source.since, -1)).slice.last
        for _ in range(
            CHANGES_PER_TURN
        ):  # twice as many changes in one callback of the loop, as of several engines' commits
            rig.store([1])
            rig.drop(rig.memory, key([1]))
        assert rig.journal.keep_up()
        while rig.journal.is_behind:  # without the turns that follow it would be so for ever
            await asyncio.sleep(0)
        chunks, found = 0, (await asyncio.to_thread(source.since, last)).slice
        while found.events:
            chunks += sum(len(event.chunks) for event in found.events)
            found = (await asyncio.to_thread(source.since, found.last)).slice
        rig.journal.close()
        return chunks, 2 * CHANGES_PER_TURN

    seen, expected = asyncio.run(asyncio.wait_for(follow(), 60))
    assert seen == expected
