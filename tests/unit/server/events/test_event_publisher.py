"""The publisher over a journal driven by hand: what routers know after gaps, and the effect of a failed read."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.clock import MonotonicClock, wall_time_s
from kvpool.config.config import load_config
from kvpool.config.event_options import EventsConfig
from kvpool.events import Event, EventKind, StoredChunk
from kvpool.layout import Layout
from kvpool.layouts.groups import Group
from kvpool.router_events.columns import NamespaceNames
from kvpool.router_events.snapshot_order import SnapshotOrder
from kvpool.router_events.vllm_format import EventForm, batches
from kvpool.server.events import publisher as event_publisher
from kvpool.server.events.publisher import EventPublisher
from kvpool.server.events.replay import Message
from kvpool.server.events.source import NamedEvents, NamedPage
from kvpool.server.metrics.measurements import LoopStalled
from kvpool.states import Level
from tests.rigs.daemon import wait_until
from tests.rigs.events.journal_rig import LAYOUT, Rig, key
from tests.rigs.events.router import Index, Router, decode

# One that never runs. A worker may come back to a module whose fixtures have ended: each time it has another one.
_loops: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(scope="module", autouse=True)
def _open_loop() -> Iterator[None]:
    """The loop of all tests, closed at the end."""
    _loops.append(asyncio.new_event_loop())
    yield
    _loops.pop().close()


class RigSource:
    """Reads a rig's journal where the daemon's thread would."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.fails = False
        self.late_pages = 0
        self.between: Callable[[], object] = lambda: None

    def _names(self) -> NamespaceNames:
        return {one.id: (one.model, one.layout) for one in self.rig.namespaces.all()}

    def since(self, last: int) -> NamedEvents:
        if self.fails:
            raise RuntimeError("the journal cannot be read")
        self.between()
        return NamedEvents(self.rig.journal.since(b"", last), self._names())

    def snapshot(self, cursor: int) -> NamedPage:
        self.between()
        page = self.rig.journal.snapshot(cursor)
        if page.words is not None and page.words.done():
            page = page.with_words(page.words.result(), self.rig.journal.chunk_tokens)
        return NamedPage(page, self._names())


def _config(**options: str) -> EventsConfig:
    settings = {"publish": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0", "insecure": "true", **options}
    return load_config(None, [f"events.{name}={value}" for name, value in settings.items()]).events


def _publisher_of(source: RigSource, *, host: str = "host", **options: str) -> EventPublisher:
    """A publisher whose connections nobody watches: the loop does not run."""
    return EventPublisher(
        _config(**options), source,  # type: ignore[arg-type]
        host=host, socket_mode=0o600, wall_time_s=wall_time_s, clock=MonotonicClock(), loop=_loops[-1],
    )  # fmt: skip


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    """A publisher that is driven by hand: its thread is never started."""
    made = _publisher_of(RigSource(Rig()))
    yield made
    made.stop()


def _rig_of(publisher: EventPublisher) -> Rig:
    source = publisher._source
    assert isinstance(source, RigSource)
    return source.rig


def _kept(publisher: EventPublisher) -> list[Message]:
    buffer = publisher._sockets.buffer
    return [buffer[at] for at in range(buffer.first, buffer.end)]


def _publish_all(publisher: EventPublisher) -> None:
    while publisher._publish_some():
        pass


def _index_of(publisher: EventPublisher) -> Index:
    index = Index(is_strict=False)
    for _, _, payload in _kept(publisher):
        for event in decode(payload)[1]:
            index.apply(event)
    return index


def _assert_right(publisher: EventPublisher) -> None:
    """Routers know exactly the stored chunks, those on disk alone included."""
    rig = _rig_of(publisher)
    found = {medium: set(blocks) for medium, blocks in _index_of(publisher).media.items()}
    for medium, level in (("CPU", Level.DRAM), ("STORAGE", Level.SSD)):
        stored = {int.from_bytes(one[-8:], "big") for one, tiers in rig.truth().items() if tiers >> level & 1}
        assert found.get(medium, set()) == stored


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_routers_know_the_stored_chunks_after_gaps_too(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig()
    source = RigSource(rig)
    publisher = _publisher_of(source, host="", replay_messages="100000")
    try:
        for _ in range(6):
            for _ in range(8):
                rig.random_step(chance)
                if chance.random() < 0.5:
                    _publish_all(publisher)
            if chance.random() < 0.6:
                rig.journal._log.open_gap()
                source.between = (lambda: rig.random_step(chance)) if chance.random() < 0.7 else lambda: None
                publisher._publish_some()
                source.between = lambda: None
            _publish_all(publisher)
            _assert_right(publisher)
        assert publisher.stats()["events.publish_errors"] == 0
    finally:
        publisher.stop()


def test_a_read_is_followed_by_another_where_the_log_has_more_alone(publisher: EventPublisher) -> None:
    rig = _rig_of(publisher)
    rig.store([1, 2])
    assert not publisher._publish_some()
    _assert_right(publisher)
    assert not publisher._publish_some()
    for number in range(3, 6):
        rig.store([number])
        found = rig.journal.since(b"", publisher._last, bytes_max=1)
        assert (len(found.events), found.has_more) == (1, number > 3)
    assert not publisher._publish_some()
    _assert_right(publisher)


def test_a_snapshot_that_is_interrupted_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread did not answer: what the other pages have comes in no event."""
    monkeypatch.setattr("kvpool.journal.journal.PAGE_CHUNKS_MAX", 2)
    source = RigSource(Rig())
    publisher = _publisher_of(source)
    try:
        for number in range(6):
            source.rig.store([number, 1])
        _publish_all(publisher)
        snapshot, pages = source.snapshot, 0

        def stall(cursor: int) -> NamedPage:
            nonlocal pages
            pages += 1
            if pages == 3:
                raise LoopStalled("no answer")
            return snapshot(cursor)

        monkeypatch.setattr(source, "snapshot", stall)
        source.rig.journal._log.open_gap()
        with pytest.raises(LoopStalled):
            _publish_all(publisher)
        _publish_all(publisher)
        _assert_right(publisher)
        assert publisher.stats()["events.published_snapshots"] == 2
    finally:
        publisher.stop()


def test_chunks_stored_during_a_snapshot_follow_those_that_it_still_has_to_list(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.journal.journal.PAGE_CHUNKS_MAX", 2)
    rig = _rig_of(publisher)
    chain = list(range(8))
    rig.store(chain)
    _publish_all(publisher)
    rig.journal._log.open_gap()
    published_before, reads = len(_kept(publisher)), 0

    def grow() -> None:
        nonlocal reads
        reads += 1
        if reads == 3:
            rig.store([*chain, 8, 9])

    publisher._source.between = grow  # type: ignore[attr-defined]
    _publish_all(publisher)
    index = Index(is_strict=True)
    for _, _, payload in _kept(publisher)[published_before:]:
        for event in decode(payload)[1]:
            index.apply(event)
    assert len(index.media["CPU"]) == 10


def test_a_failed_read_is_counted_and_everything_is_republished() -> None:
    rig = Rig()
    source = RigSource(rig)
    publisher = _publisher_of(source)
    rig.store([1, 2])
    source.fails = True
    publisher.start()
    try:
        wait_until(lambda: publisher.stats()["events.publish_errors"] == 1, "the failure is counted")
        source.fails = False
        publisher.wake()
        wait_until(lambda: publisher.stats()["events.published_snapshots"] == 1, "everything is published anew")
        with Router(publisher.publish_endpoint, publisher.replay_endpoint) as router:
            wait_until(lambda: len(router.replay(0)) >= 1, "it is published")
            router.catch_up("kv@host@model")
            assert len(router.index.media["CPU"]) == 2
    finally:
        publisher.stop()
    publisher.wake()


def test_a_wake_up_during_a_read_is_not_lost(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.eventfd_read

    def overlapping(fd: int) -> int:
        publisher.wake()
        return read(fd)

    monkeypatch.setattr(os, "eventfd_read", overlapping)
    publisher.wake()
    publisher._turn()
    publisher.wake()
    assert publisher._wake_fd in dict(publisher._sockets.poller.poll(0))


def test_a_failed_bind_leaves_nothing_behind() -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(OSError, match=f"events.replay tcp://127.0.0.1:{port} cannot be bound"):
            _publisher_of(RigSource(Rig()), replay=f"tcp://127.0.0.1:{port}")
    finally:
        context.destroy(linger=0)


def test_messages_are_bounded_by_bytes_events_and_topics() -> None:
    form = EventForm()
    stored = [
        Event(0, EventKind.STORED, keys=key([at]), tokens=bytes(4 * 8), tiers=1 << Level.DRAM) for at in range(600)
    ]
    published = [("a", form.events_of(event, "m", LAYOUT)) for event in stored]
    cut = batches([*published, ("b", published[0][1]), ("b", published[0][1]), ("b", [form.all_cleared()])])
    assert [(batch.topic, len(batch.events)) for batch in cut][-1:] == [("b", 3)]
    assert sum(len(batch.events) for batch in cut) == 603
    assert max(len(batch.payload(0.0)) for batch in cut) <= 64 << 10
    assert max(len(batch.events) for batch in cut) <= 256
    assert batches([]) == batches([("a", [])]) == []


def test_of_several_groups_the_first_full_one_is_published() -> None:
    full = Group(layers=2, kv_heads=1, head_dim=64, dtype="float16")
    layout = Layout(chunk_tokens=8, groups=(full, full, replace(full, kind="window", window=8)))
    event = Event(0, EventKind.STORED, keys=key([1]), tokens=bytes(32), tiers=2)
    assert [len(EventForm().events_of(event, "m", part)) for part in layout.group_layouts] == [1, 0, 0]


def _chunk(names: list[int]) -> StoredChunk:
    parent = key(names[:-1]) if len(names) > 1 else b""
    return StoredChunk(key(names), parent, 0, 1 << Level.DRAM, 35, b"t")


def test_a_snapshot_is_published_parents_first_with_the_latest_state() -> None:
    order = SnapshotOrder(waiting_max=100)
    chain = [_chunk([1, 2, 3][: at + 1]) for at in range(3)]
    gone, moved = _chunk([1, 7]), _chunk([1, 8])
    assert order.admit([chain[2], gone, moved, chain[1]]) == []
    due = order.note_events([
        Event(1, EventKind.REMOVED, keys=gone.key, tiers_before=2),
        Event(2, EventKind.UPDATED, keys=moved.key, tiers=4, tiers_before=2),
    ])  # fmt: skip
    assert due == ()
    published = order.admit([chain[0]])
    assert published[0].key == chain[0].key
    assert {chunk.key: chunk.tiers for chunk in published} == {**{chunk.key: 2 for chunk in chain}, moved.key: 4}
    assert order.rest() == []


def _stored(number: int, chain: list[StoredChunk]) -> Event:
    keys, tokens = b"".join(chunk.key for chunk in chain), b"".join(chunk.tokens for chunk in chain)
    return Event(number, EventKind.STORED, 0, keys, chain[0].parent, tokens, 2, adapter="lora", salt_tag=b"salt")


def test_what_is_stored_meanwhile_waits_for_what_a_later_page_has() -> None:
    order = SnapshotOrder(waiting_max=100)
    chain = [_chunk([1, 2, 3, 4, 5][: at + 1]) for at in range(5)]
    assert order.admit([chain[0]]) == [chain[0]]
    in_order = _stored(1, [_chunk([1, 7])])
    assert order.note_events([in_order, _stored(2, chain[2:4]), _stored(3, chain[4:])]) == (in_order,)
    named = [chunk._replace(adapter="lora", salt_tag=b"salt") for chunk in chain]
    assert order.admit([chain[1]]) == [chain[1], *named[2:]]
    assert order.rest() == []


def test_the_rest_is_published_parents_first() -> None:
    order = SnapshotOrder(waiting_max=100)
    chain, orphans = [_chunk([1, 2, 3][: at + 1]) for at in range(3)], [_chunk([4, 2, 3][: at + 1]) for at in (2, 1)]
    assert order.admit([chain[2], *orphans]) == []
    parents = [_stored(1, [chain[0]]), _stored(2, [chain[1]])]
    assert order.note_events(parents) == tuple(parents)
    assert order.rest() == [chain[2], orphans[1], orphans[0]]
    assert order.rest() == []


def test_chunks_that_wait_for_parents_are_bounded() -> None:
    order = SnapshotOrder(waiting_max=3)
    orphans = [_chunk([at, 1]) for at in range(5)]
    assert order.admit(orphans) == orphans[:2]
    assert order.rest() == orphans[2:]


def test_topics_are_bounded_and_restart_when_they_return(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "TOPICS_MAX", 3)
    for model in ("a", "b", "c", "a", "d", "b"):
        publisher._begin(model)
        publisher._send([(model, [publisher._form.all_cleared()])])
    assert list(publisher._numbers) == ["a", "d", "b"]
    numbers = [int.from_bytes(number, "big") for topic, number, _ in _kept(publisher) if topic == b"b"]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[2], numbers[2] + 1]
    assert numbers[2] > numbers[1]
