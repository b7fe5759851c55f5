"""The pool's events in vLLM's stream: their sum is the content of the pool, after any failure in between."""

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.events import Event, EventKind, StoredChunk
from kvpool.router_events.columns import NamespaceNames
from kvpool.router_events.vllm_format import Batch
from kvpool.states import levels_in
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.events import BEGINNING, EventBatch, EventMark, SnapshotPart
from kvpool_client.vllm import event_feed
from kvpool_client.vllm.event_feed import EventFeed
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.events.router import Index
from tests.rigs.vllm.config import caches_of, config_of
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.fake_vllm import KVConnectorRole
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, prompt

MEDIA = {"HBM": "GPU", "DRAM": "CPU", "SSD": "STORAGE"}


class Listener:
    """The knowledge of a subscriber of one engine's stream."""

    def __init__(self, engine: ScriptedEngine, *, is_strict: bool = True) -> None:
        self.engine = engine
        self.index = Index(is_strict=is_strict)
        self.kinds: list[str] = []
        self.stored_blocks = 0  # since everything was cleared

    def listen(self) -> None:
        """One step of an engine that has nothing to compute, and the events that it published."""
        self.engine.step()
        events, self.engine.events = self.engine.events, []
        for event in events:
            self.kinds.append(type(event).__name__)
            self.stored_blocks = (
                0 if self.kinds[-1] == "AllBlocksCleared" else self.stored_blocks + len(event.block_hashes)
            )
            self.index.apply({"type": self.kinds[-1], **dataclasses.asdict(event)})

    def knows_what_is_stored(self) -> bool:
        """True if it knows the chunks of rank 0 of the pool, block by block."""
        self.listen()
        chunks = {}
        for part in self.engine.scheduler._scheduler.pool.snapshot():
            chunks.update(
                {one.key: one for one in part.chunks if part.namespaces[one.namespace][1].rank == 0 and one.tokens}
            )
        expected: dict[str, set[tuple[int, ...]]] = {}
        for chunk in chunks.values():
            before, above = list[int](), chunk
            while above.parent:
                above = chunks[above.parent]
                before = np.frombuffer(above.tokens, "<i4").tolist() + before
            tokens = (*before, *np.frombuffer(chunk.tokens, "<i4").tolist())
            ends = range(len(before) + BLOCK, len(tokens) + 1, BLOCK)
            for level in levels_in(chunk.tiers):
                expected.setdefault(MEDIA[level.name], set()).update(tokens[:end] for end in ends)
        return self.index.prefixes() == expected

    def wait(self) -> None:
        wait_until(self.knows_what_is_stored, "the listener knows what the pool has")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_listener_knows_chunks_stored_by_any_engine(start: StartEngine, ranks: int) -> None:
    other = start(ranks=ranks)
    ask(other, "before", prompt(1, 3 * CHUNK + 1))
    listener = Listener(start(ranks=ranks, kvpool__events=True))
    listener.engine.run(Request("own", prompt(2, 2 * CHUNK + 1), new_tokens=CHUNK))
    listener.wait()
    ask(other, "after", prompt(1, 3 * CHUNK) + prompt(3, 2 * CHUNK))
    listener.wait()
    assert len(listener.index.media["CPU"]) == (3 + 3 + 2) * CHUNK // BLOCK
    assert "AllBlocksCleared" not in listener.kinds
    assert not other.events


def test_dropped_chunks_are_published_as_removed(start: StartEngine, daemon: Daemon) -> None:
    listener = Listener(start(kvpool__events=True))
    ask(listener.engine, "own", prompt(2, 2 * CHUNK + 1))
    listener.wait()
    with daemon.admin() as admin:
        admin.flush(None, None)
    listener.wait()
    assert not any(listener.index.media.values())


def test_everything_is_republished_after_a_restart_of_the_daemon(start: StartEngine, daemon: Daemon) -> None:
    listener = Listener(start(kvpool__events=True))
    listener.engine.run(Request("own", prompt(2, 2 * CHUNK + 1)))
    listener.wait()
    daemon.kill()
    daemon.start()
    wait_until(lambda: listener.engine.scheduler._scheduler.pool.connected, "the engine is served again")
    wait_until(lambda: all(worker._worker.pool.connected for worker in listener.engine.workers), "its worker too")
    listener.engine.run(Request("again", prompt(3, 3 * CHUNK + 1)))
    listener.wait()
    assert listener.kinds.count("AllBlocksCleared") == 1
    assert len(listener.index.media["CPU"]) == 3 * CHUNK // BLOCK


@pytest.mark.parametrize("waits", [True, False])
def test_the_pools_blocks_are_published_again_behind_vllms_own_reset(start: StartEngine, waits: bool) -> None:
    """vLLM's event of it has no medium: a router forgets the pool's blocks too."""
    ask(start(), "before", prompt(1, 3 * CHUNK + 1))
    listener = Listener(start(kvpool__events=True))
    for _ in range(2):
        if waits:
            listener.wait()
        listener.engine.forget()
        listener.wait()
        assert len(listener.index.media["CPU"]) == 3 * CHUNK // BLOCK
    assert listener.kinds.count("AllBlocksCleared") == 2, "vLLM's own"


def test_what_was_ready_before_a_reset_is_not_published_behind_it(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is part of what is published again: one batch is ready, the next one waits for its place."""
    monkeypatch.setattr(event_feed, "BATCHES_MAX", 1)
    monkeypatch.setattr(
        event_feed, "batches", lambda groups: [Batch("", (event,)) for _, all_of in groups for event in all_of]
    )
    listener = Listener(start(kvpool__events=True))
    listener.wait()
    other = start()
    for number in range(3):
        ask(other, f"before-{number}", prompt(number, 3 * CHUNK + 1))
    feed = listener.engine.scheduler._scheduler._feed
    wait_until(lambda: bool(feed._ready), "a batch is ready")
    listener.engine.forget()
    listener.wait()
    ask(other, "after", prompt(3, 3 * CHUNK + 1))
    listener.wait()
    assert listener.stored_blocks == len(listener.index.media["CPU"]) == 4 * 3 * CHUNK // BLOCK


def test_for_an_idle_engine_waiting_events_are_bounded_and_it_catches_up(
    start: StartEngine, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "BATCHES_MAX", 1)
    daemon = start_daemon(events__buffer="64KiB")
    listener = Listener(start(socket=daemon.socket, kvpool__events=True))
    other = start(socket=daemon.socket)
    feed = listener.engine.scheduler._scheduler._feed
    ask(other, "first", prompt(1, 2 * CHUNK))
    wait_until(lambda: len(feed._ready) == 1, "one batch lies ready")
    with daemon.admin() as admin:
        number = 0
        # Until the events after the last read ones are no longer retained.
        while int(daemon.stats()["events.dropped"]) <= feed._mark.last:
            ask(other, f"more-{number}", prompt(10 + number, 12 * CHUNK))
            admin.flush(None, None)
            number += 1
    ask(other, "last", prompt(9, 4 * CHUNK))
    assert len(feed._ready) == 1
    listener.wait()
    assert listener.kinds.count("AllBlocksCleared") == 1


def test_a_hung_daemon_delays_no_step(start: StartEngine, daemon: Daemon) -> None:
    engine = start(kvpool__events=True, kvpool__timeout_s=600.0)
    daemon.signal(signal.SIGSTOP)
    stepping = threading.Thread(
        target=lambda: [engine.scheduler.take_events() for _ in range(100)], name="stepping", daemon=True
    )
    stepping.start()
    stepping.join(60.0)
    has_ended = not stepping.is_alive()
    daemon.signal(signal.SIGCONT)
    stepping.join(60.0)
    assert has_ended, "a step waits for the daemon"


def test_events_of_a_failed_turn_are_published_again(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(start(kvpool__events=True))
    listener.engine.run(Request("own", prompt(2, 2 * CHUNK + 1)))
    listener.wait()
    feed = listener.engine.scheduler._scheduler._feed
    failures = iter([RuntimeError("spilt")])
    wire = feed._wire

    def failing(event: Any) -> Any:
        for error in failures:
            raise error
        return wire(event)

    monkeypatch.setattr(feed, "_wire", failing)
    listener.engine.run(Request("next", prompt(3, 2 * CHUNK + 1)))
    listener.wait()
    assert listener.kinds.count("AllBlocksCleared") == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_events_need_the_option_and_vllms_own(start: StartEngine, daemon: Daemon, *, is_on: bool) -> None:
    connector = type(start().scheduler)
    config = config_of(daemon.socket, kvpool__events=is_on)
    config.kv_events_config.enable_kv_cache_events = not is_on
    scheduler = connector(config, KVConnectorRole.SCHEDULER, caches_of())
    assert scheduler._scheduler._feed is None
    assert list(scheduler.take_events()) == []
    scheduler.shutdown()


class OverlappingPool:
    """A pool whose second page of a snapshot is older than the events that can be read by then."""

    def __init__(self) -> None:
        layout = kv.Layout(layers=1, kv_heads=1, head_dim=1, dtype="uint8", chunk_tokens=CHUNK)
        self.names: NamespaceNames = {0: ("model", layout)}
        stored = [
            Event(6 + number, EventKind.STORED, 0, key(1 + number), tokens=TOKENS, tiers=2) for number in range(2)
        ]
        self.happened = [*stored, Event(8, EventKind.REMOVED, 0, key(1), tiers_before=2)]

    def events(self, since: EventMark) -> EventBatch:
        if since == BEGINNING:
            return EventBatch((), EventMark(LIFE, 5), is_gap=True, namespaces={})
        news = tuple(event for event in self.happened if event.id > since.last)
        return EventBatch(news, EventMark(LIFE, self.happened[-1].id), is_gap=False, namespaces=self.names)

    def snapshot(self) -> Iterator[SnapshotPart]:
        yield SnapshotPart((self._chunk(0),), EventMark(LIFE, 5), self.names)
        yield SnapshotPart((self._chunk(1), self._chunk(2)), EventMark(LIFE, 7), self.names)
        self.happened.append(Event(9, EventKind.STORED, 0, key(3), tokens=TOKENS, tiers=2))

    def close(self) -> None:
        pass

    def _chunk(self, number: int) -> StoredChunk:
        return StoredChunk(key(number), b"", 0, 2, 35, TOKENS)


LIFE = bytes(16)
TOKENS = bytes(4 * CHUNK)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_page_older_than_the_events_read_restores_no_removed_chunk() -> None:
    pool: Any = OverlappingPool()
    feed = EventFeed(pool, lambda name, fields: {"type": name, **fields}, 0, FailureGuard(logging.getLogger("test")))
    index = Index(is_strict=False)

    def hears() -> bool:
        for event in feed.take_batch():
            index.apply(event)  # type: ignore[arg-type]  # as it was made above
        return set(index.media.get("CPU", ())) == {int.from_bytes(key(number)[-8:], "big") for number in (0, 2, 3)}

    wait_until(hears, "what was removed is not there, and what came last is")
    feed.stop()


class SlowPool:
    """A pool whose snapshot has no end, or whose first page does not come until the test allows it."""

    def __init__(self, *, has_pages: bool) -> None:
        self.has_pages = has_pages
        self.is_asked = threading.Event()
        self.is_let_go = threading.Event()
        self.is_closed = threading.Event()

    def events(self, since: EventMark) -> EventBatch:
        return EventBatch((), since, is_gap=True, namespaces={})

    def snapshot(self) -> Iterator[SnapshotPart]:
        self.is_asked.set()
        while not self.is_let_go.is_set():
            if self.has_pages:
                yield SnapshotPart((), EventMark(LIFE, -1), {})
            else:
                self.is_let_go.wait(30.0)

    def close(self) -> None:
        self.is_closed.set()


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_feed_that_stops_waits_for_no_snapshot(monkeypatch: pytest.MonkeyPatch, *, has_pages: bool) -> None:
    # Where pages come the deadline is not needed, and without them nothing else ends the wait.
    monkeypatch.setattr(event_feed, "STOP_TIMEOUT_S", 600.0 if has_pages else 0.05)
    slow = SlowPool(has_pages=has_pages)
    pool: Any = slow
    feed = EventFeed(pool, lambda name, fields: (name, fields), 0, FailureGuard(logging.getLogger("test")))
    assert slow.is_asked.wait(60.0)
    stopping = threading.Thread(target=feed.stop, name="stopping")
    stopping.start()
    try:
        stopping.join(60.0)
        assert not stopping.is_alive()
        assert slow.is_closed.is_set() == has_pages
    finally:
        slow.is_let_go.set()
        stopping.join(60.0)
    assert slow.is_closed.wait(60.0)
