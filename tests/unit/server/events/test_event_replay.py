"""Replays and republishing: retained messages, the cost of a peer that does not read, the number of republished snapshots."""

import pytest

from kvpool.server.events import replay as event_replay
from kvpool.server.events import republish_schedule
from kvpool.server.events.replay import NUMBER, PEERS_MAX, Message, ReplayBuffer, Replays
from kvpool.server.events.republish_schedule import REPUBLISHED_AT_ONCE, Republish, RepublishSchedule
from tests.rigs.clock import HandClock


def _message(number: int, topic: bytes = b"a", size: int = 10) -> Message:
    return topic, NUMBER.pack(number), bytes(size)


class Peers:
    """Peers that take as many messages as they have room for; without an entry they have gone."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = {}
        self.taken: dict[bytes, list[Message | None]] = {}

    def send(self, peer: bytes, message: Message | None) -> bool:
        if peer not in self.room:
            raise ConnectionResetError
        if not self.room[peer]:
            return False
        self.room[peer] -= 1
        self.taken.setdefault(peer, []).append(message)
        return True


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def test_retained_messages_are_bounded_in_number_and_in_bytes() -> None:
    for buffer in (ReplayBuffer(messages_max=5, bytes_max=1 << 20), ReplayBuffer(messages_max=100, bytes_max=5 * 19)):
        for number in range(20):
            buffer.append(_message(number))
        assert (len(buffer), buffer.first, buffer.end) == (5, 15, 20)
        assert buffer.used_bytes == 5 * 19
        assert buffer.has_lost(14, None)
        assert buffer.has_lost(14, b"a")
        assert not buffer.has_lost(15, b"a")
        assert not buffer.has_lost(0, b"another")
    single = ReplayBuffer(messages_max=100, bytes_max=10)
    single.append(_message(0, size=1000))
    assert len(single) == 1


def test_lost_messages_are_known_for_each_topic() -> None:
    buffer = ReplayBuffer(messages_max=3, bytes_max=1 << 20)
    for number in range(3):
        buffer.append(_message(number, b"old"))
    for number in range(3):
        buffer.append(_message(number, b"new"))
    assert buffer.has_lost(2, b"old")
    assert not buffer.has_lost(3, b"old")
    assert not buffer.has_lost(0, b"new")
    assert buffer.has_lost(0, None)


def test_a_peer_that_does_not_read_delays_no_other_and_is_dropped(clock: HandClock) -> None:
    buffer, peers = ReplayBuffer(messages_max=1000, bytes_max=1 << 20), Peers()
    for number in range(600):
        buffer.append(_message(number))
    replays = Replays(buffer, peers.send, clock)
    peers.room = {b"slow": 3, b"good": 1 << 20}
    replays.begin_replay(b"slow", 0, None)
    replays.begin_replay(b"good", 500, b"a")
    while replays.send_waiting():
        pass
    assert len(replays) == 1
    clock.advance(event_replay.STALLED_S)
    assert replays.send_waiting() == 0
    assert len(replays) == 0
    assert [NUMBER.unpack(message[1])[0] for message in peers.taken[b"good"] if message] == list(range(500, 600))
    assert peers.taken[b"good"][-1] is None
    assert len(peers.taken[b"slow"]) == 3
    assert replays.unsent_replays == 1
    replays.begin_replay(b"slow", 0, None)
    assert len(replays) == 0
    assert replays.wait_ms is None


def test_peers_are_bounded_and_a_stalled_one_counts_until_it_has_certainly_gone(clock: HandClock) -> None:
    buffer, peers = ReplayBuffer(messages_max=10, bytes_max=1 << 20), Peers()
    buffer.append(_message(0))
    replays = Replays(buffer, peers.send, clock)
    for number in range(PEERS_MAX):
        peers.room[bytes([number])] = 0
        assert replays.has_room
        replays.begin_replay(bytes([number]), 0, None)
    assert not replays.has_room
    clock.advance(event_replay.STALLED_S)
    replays.send_waiting()
    assert len(replays) == 0
    assert not replays.has_room
    assert replays.wait_ms is not None
    clock.advance(event_replay.HELD_S / 2)
    assert not replays.has_room
    clock.advance(event_replay.HELD_S / 2)
    assert replays.has_room, "their connections have ended"


def test_a_new_request_or_a_disconnect_ends_a_peers_earlier_replay(clock: HandClock) -> None:
    buffer, peers = ReplayBuffer(messages_max=10, bytes_max=1 << 20), Peers()
    for number in range(4):
        buffer.append(_message(number))
    replays = Replays(buffer, peers.send, clock)
    peers.room[b"p"] = 0
    replays.begin_replay(b"p", 0, None)
    replays.begin_replay(b"p", 3, None)
    assert len(replays) == 1
    peers.room[b"p"] = 100
    while len(replays):
        replays.send_waiting()
    assert peers.taken[b"p"] == [_message(3), None]
    del peers.room[b"p"]
    replays.begin_replay(b"p", 0, None)
    replays.send_waiting()
    assert len(replays) == 0
    assert replays.unsent_replays == 2


def test_messages_dropped_during_a_replay_are_skipped(clock: HandClock) -> None:
    buffer, peers = ReplayBuffer(messages_max=4, bytes_max=1 << 20), Peers()
    for number in range(4):
        buffer.append(_message(number))
    replays = Replays(buffer, peers.send, clock)
    peers.room[b"p"] = 1
    replays.begin_replay(b"p", 0, None)
    replays.send_waiting()
    for number in range(4, 7):
        buffer.append(_message(number))
    peers.room[b"p"] = 100
    while len(replays):
        replays.send_waiting()
    assert peers.taken[b"p"] == [_message(0), _message(3), None]


def test_one_peer_causes_one_republish_and_many_cause_a_few(clock: HandClock) -> None:
    schedule = RepublishSchedule(100.0, clock)
    assert schedule.take_due() == Republish.NOTHING
    republished = 0
    for _ in range(50):
        schedule.note_lost(b"one")
        republished += schedule.take_due() == Republish.EVERYTHING
    assert republished == 1
    for number in range(2 * republish_schedule.PEERS_KNOWN_MAX):
        schedule.note_lost(number.to_bytes(4, "big"))
        republished += schedule.take_due() == Republish.EVERYTHING
    assert republished == REPUBLISHED_AT_ONCE
    assert len(schedule._peers) <= republish_schedule.PEERS_KNOWN_MAX
    schedule.note_newcomer()
    clock.advance(republish_schedule.SETTLE_S)
    assert schedule.take_due() == Republish.MARK
    assert schedule.take_due() == Republish.NOTHING
    wait_ms = schedule.wait_ms
    assert wait_ms is not None
    assert 200_000 < wait_ms <= 300_001


def test_nothing_is_republished_where_the_interval_is_zero(clock: HandClock) -> None:
    schedule = RepublishSchedule(0.0, clock)
    schedule.note_lost(b"p")
    schedule.note_newcomer()
    clock.advance(republish_schedule.SETTLE_S)
    assert schedule.take_due() == Republish.MARK
    assert schedule.take_due() == Republish.NOTHING


def test_a_request_that_came_too_soon_gets_its_snapshot_when_its_time_has_come(clock: HandClock) -> None:
    schedule = RepublishSchedule(1.0, clock)
    schedule.note_lost(b"p")
    assert schedule.take_due() == Republish.EVERYTHING
    schedule.note_lost(b"p")
    assert schedule.take_due() == Republish.NOTHING
    assert schedule.wait_ms == 3001
    clock.advance(3.0)
    assert schedule.take_due() == Republish.EVERYTHING
    assert schedule.wait_ms is None
    schedule.note_lost(b"p")
    assert schedule.take_due() == Republish.NOTHING, "that one counts, too"


def test_what_is_due_while_snapshots_are_too_recent_waits_for_them(clock: HandClock) -> None:
    schedule = RepublishSchedule(1.0, clock)
    for seconds, peers in ((0.0, b"a"), (2.0, b"bc"), (1.0, b"")):
        clock.advance(seconds)
        for peer in peers:
            schedule.note_lost(bytes([peer]))
            if peers == b"a":
                schedule.note_lost(bytes([peer]))
            assert schedule.take_due() == Republish.EVERYTHING
    schedule.note_lost(b"d")
    schedule.take_due()
    schedule.note_lost(b"e")
    turns = 0
    while schedule.take_due() == Republish.NOTHING:
        wait_ms, turns = schedule.wait_ms, turns + 1
        assert wait_ms is not None
        clock.advance(wait_ms / 1000)
    assert turns <= 2


def test_a_number_without_a_topic_asks_for_those_that_have_begun_below_it() -> None:
    buffer = ReplayBuffer(messages_max=4, bytes_max=1 << 20)
    for number in range(100, 103):
        buffer.append(_message(number))
    for number in range(1000, 1006):
        buffer.append(_message(number, b"b"))
    assert not buffer.has_lost(103, None), "nothing of its own, and the other topic has begun later"
    assert buffer.has_lost(102, None)
    assert buffer.has_lost(1001, None)
    assert not buffer.has_lost(1002, None)
    assert buffer.has_lost(0, None), "from the beginning"


def test_topics_whose_numbers_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_replay, "TOPICS_KNOWN_MAX", 3)
    buffer = ReplayBuffer(messages_max=2, bytes_max=1 << 20)
    for number in range(20):
        buffer.append(_message(number, b"%d" % number))
    assert len(buffer._spans) == 3
    assert [message[0] for message in (buffer[18], buffer[19])] == [b"18", b"19"]
