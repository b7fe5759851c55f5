"""Event publisher: publishes to routers over ZMQ which chunks are stored, removed and moved, as it happens.

A thread of its own. It reads the journal like any other subscriber, so that the control thread never waits for it: where it
falls behind it gets a gap, and so do routers, whose numbers jump. After a gap it publishes everything again:

    AllBlocksCleared under every topic, then what a snapshot has, parents before children, events going on in between

It does the same, as often as `republish_schedule.py` allows, for routers that are new or request messages that have left the
buffer.

The first message of every topic is AllBlocksCleared, as soon as the model has a namespace: events of an earlier daemon process
are void.

Threads: the control thread makes it, calls `wake` and reads `stats`; everything else happens on the thread `kvpool-events`,
which owns the sockets from `start` on. Bounds: the log behind it, `queue_messages` for a subscriber, the replay buffer,
ORPHANS_MAX chunks of a snapshot that wait for their parents.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import zmq

from kvpool.clock import Clock
from kvpool.config.event_options import EventsConfig
from kvpool.events import StoredChunk
from kvpool.ids import PROBE_MODEL
from kvpool.keys import name_without_revision
from kvpool.router_events.columns import NamespaceNames
from kvpool.router_events.snapshot_order import SnapshotOrder
from kvpool.router_events.vllm_format import Batch, EventForm, WireEvent, batches
from kvpool.server.events.replay import NUMBER
from kvpool.server.events.republish_schedule import Republish, RepublishSchedule
from kvpool.server.events.sockets import EventSockets
from kvpool.server.events.source import EventSource, NamedEvents
from kvpool.server.events.step_watch import StepWatch
from kvpool.server.metrics.measurements import LoopStalled

log = logging.getLogger(__name__)

POLL_MS = 60_000
RETRY_MS = 200
# Pause between the first new event and its reading: the requests that cause events are answered first, because both need the
# interpreter (a commit of 512 chunks took three times as long without the pause, measured).
LINGER_S = 0.01
STOP_TIMEOUT_S = 5.0
ORPHANS_MAX = 65_536
# Twice as many as there can be namespaces: models come and go in a daemon's life.
TOPICS_MAX = 8192
# After so many gaps during a snapshot, it is begun again later.
SNAPSHOT_ATTEMPTS = 3
# Numbers of a topic begin at the time in these parts of a second since 1970: no daemon publishes as many messages.
NUMBERS_PER_S = 1_000_000
# An id after which no log continues: the next read is a gap, and everything is published again.
NOWHERE = -2

Outgoing = list[tuple[str, list[WireEvent]]]


class EventPublisher:
    """One daemon's publisher. Its sockets are bound by the constructor; it publishes between `start` and `stop`."""

    def __init__(
        self,
        config: EventsConfig,
        source: EventSource,
        *,
        host: str,
        socket_mode: int,
        wall_time_s: Callable[[], float],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        model: str = "",
    ) -> None:
        """`loop`: the control thread's, which watches connections. `model`: the only one that is published, by its name with or
        without a revision; empty: all. Raises OSError or ConfigError; then nothing is bound."""
        self._source = source
        self._topic = config.topic
        self._model = model
        self._host = host
        self._wall_time_s = wall_time_s
        self._form = EventForm(
            is_positional=config.format == "positional", block_tokens=config.block_tokens, has_places=config.ownership
        )
        self._schedule = RepublishSchedule(config.republish_interval, clock)
        self._sockets = EventSockets(config, socket_mode, clock, loop)
        self.publish_endpoint = self._sockets.publish_endpoint
        self.replay_endpoint = self._sockets.replay_endpoint
        self._numbers: dict[str, int] = {}
        self._topics: dict[str, str] = {}  # of models that are published
        self._last = -1
        self._messages = 0
        self._events = 0
        self._replayed = 0
        self._snapshots = 0
        self._errors = 0
        self._is_stopping = False
        self._is_woken = False
        self._has_backlog = True
        self._pause = threading.Event()  # never set
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sockets.poller.register(self._wake_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)
        self._loop = loop
        self._steps = 0
        self._watch: StepWatch | None = None

    def __repr__(self) -> str:
        return f"<EventPublisher {self.publish_endpoint}, {self._messages} messages>"

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()
        self._watch = StepWatch(self._thread, lambda: self._steps, self._sockets.end_subscribers, self._loop)

    def wake(self) -> None:
        """Signal new events. Any thread; never waits."""
        if not self._is_woken and not self._is_stopping:
            self._is_woken = True
            os.eventfd_write(self._wake_fd, 1)

    def close_listeners(self) -> None:
        """No router can connect any more. On the loop, before `stop`."""
        if self._watch is not None:
            self._watch.close()
        self._sockets.close_listeners()

    def stop(self) -> None:
        """End the thread and the sockets. Blocks for at most STOP_TIMEOUT_S; not on the loop. REQUIRES: the listeners are
        closed."""
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._sockets.close()
            os.close(self._wake_fd)

    def let_in(self, clients: frozenset[bytes]) -> None:
        """Let routers with these keys connect from now on, and no others. Any thread."""
        self._sockets.let_in(clients)

    def problems(self) -> list[str]:
        """Whether the thread has died, in a line. Any thread."""
        has_died = self._thread.ident is not None and not self._thread.is_alive() and not self._is_stopping
        return ["events: the thread of the publisher has died"] if has_died else []

    def stats(self) -> dict[str, int]:
        """Counters, by name. Any thread: each is a number at some moment."""
        return {
            "events.published_messages": self._messages,
            "events.published": self._events,
            "events.replayed_messages": self._replayed,
            "events.published_snapshots": self._snapshots,
            "events.late_headers": self._source.late_pages,
            "events.publish_errors": self._errors,
            "events.refused_routers": self._sockets.refused_routers,
            "events.bad_requests": self._sockets.bad_requests,
            "events.ended_connections": self._sockets.ended_connections,
            "events.accept_closures": self._sockets.accept_closures,
            "events.unsent_replays": self._sockets.unsent_replays,
        }

    def _run(self) -> None:
        while not self._is_stopping:
            self._turn_safely()

    def _turn_safely(self) -> None:
        try:
            self._turn()
        except Exception:
            self._errors += 1
            if self._errors == 1:
                log.exception("an event could not be published; further ones like it are counted, not logged")
            self._last, self._has_backlog = NOWHERE, True
            self._pause.wait(RETRY_MS / 1e3)

    def _turn(self) -> None:
        """Wait for work and do some of it."""
        self._steps += 1
        waits = [wait for wait in (POLL_MS, self._sockets.wait_ms, self._schedule.wait_ms) if wait is not None]
        ready = dict(self._sockets.poller.poll(0 if self._has_backlog else min(waits)))
        if self._wake_fd in ready:
            # In this order: otherwise a wake between the two would be consumed with its flag still set, and no other would
            # follow.
            os.eventfd_read(self._wake_fd)
            self._is_woken = False
            if not self._has_backlog and not self._is_stopping:
                self._pause.wait(LINGER_S)
            self._has_backlog = True
        self._serve()
        due = self._schedule.take_due()
        if due == Republish.EVERYTHING:
            self._last, self._has_backlog = NOWHERE, True
        elif due == Republish.MARK:
            self._send_marks()
        if self._has_backlog and not self._is_stopping:
            try:
                self._has_backlog = self._publish_some()
            except LoopStalled as error:
                log.warning("events wait: %s", error)
                self._sockets.poller.poll(RETRY_MS)

    def _serve(self) -> None:
        self._steps += 1
        self._replayed += self._sockets.serve()
        subscribed, self._sockets.subscribed = self._sockets.subscribed, set()
        if any(topic.encode().startswith(tuple(subscribed)) for topic in self._numbers):
            self._schedule.note_newcomer()
        lost, self._sockets.lost = self._sockets.lost, set()
        for peer in lost:
            self._schedule.note_lost(peer)

    def _publish_some(self) -> bool:
        """Publish the new events of one read. Whether there are more: for what comes later it is woken."""
        found = self._read_events()
        if found.slice.is_gap:
            self._republish()
        else:
            self._publish_events(found)
        return found.slice.is_gap or found.slice.has_more

    def _republish(self) -> None:
        """Publish everything again. Where gaps prevent that, the next turn begins again."""
        for _ in range(SNAPSHOT_ATTEMPTS):
            self._snapshots += 1
            try:
                if self._publish_snapshot():
                    return
            except BaseException:
                self._last = NOWHERE  # what is missing of it comes in no event
                raise

    def _publish_snapshot(self) -> bool:
        """Publish a snapshot. Whether it is complete, without another gap."""
        self._form.forget_published()
        self._send([(topic, [self._form.all_cleared()]) for topic in self._numbers])
        order, names = SnapshotOrder(ORPHANS_MAX), NamespaceNames()
        cursor, is_first = 0, True
        while cursor >= 0 and not self._is_stopping:
            found = self._source.snapshot(cursor)
            if is_first:
                self._last, is_first = found.page.as_of, False
            while self._last < found.page.as_of:
                news = self._read_events()
                if news.slice.is_gap:
                    return False
                happened = news.slice.events_until(found.page.as_of)
                names.update(news.namespaces)
                due = replace(happened, events=order.note_events(happened.events))
                self._publish_events(NamedEvents(due, news.namespaces))
            names.update(found.namespaces)
            self._publish_chunks(order.admit(found.page.chunks), names)
            self._serve()
            cursor = found.page.cursor
        self._publish_chunks(order.rest(), names)
        return True

    def _publish_events(self, found: NamedEvents) -> None:
        outgoing: Outgoing = []
        for event in found.slice.events:
            name = found.namespaces.get(event.namespace)
            if name is not None and self._is_published(name[0]):
                outgoing.append((self._topic_of(name[0]), self._form.events_of(event, *name)))
        self._send(outgoing)
        self._last = found.slice.last

    def _publish_chunks(self, chunks: list[StoredChunk], names: NamespaceNames) -> None:
        outgoing: Outgoing = []
        for chunk in chunks:
            model, layout = names[chunk.namespace]
            if self._is_published(model):
                outgoing.append((self._topic_of(model), self._form.chunk_events(chunk, model, layout)))
        self._send(outgoing)

    def _is_published(self, model: str) -> bool:
        return model in self._topics or (
            model != PROBE_MODEL and self._model in ("", model, name_without_revision(model))
        )

    def _topic_of(self, model: str) -> str:
        topic = self._topics.get(model)
        if topic is None:
            if len(self._topics) == TOPICS_MAX:
                self._topics.clear()
            topic = self._topic.format(host=self._host, model=model, name=name_without_revision(model))
            self._topics[model] = topic
        return topic

    def _read_events(self) -> NamedEvents:
        """New events, after the topics of their models have begun."""
        self._steps += 1
        found = self._source.since(self._last)
        for model in filter(self._is_published, found.models):
            self._begin(self._topic_of(model))
        return found

    def _begin(self, topic: str) -> None:
        if topic not in self._numbers:
            if len(self._numbers) == TOPICS_MAX:
                # It begins again, with AllBlocksCleared, when it is needed again.
                del self._numbers[next(iter(self._numbers))]
            if self._numbers:
                self._schedule.note_newcomer()
            self._numbers[topic] = self._first_number()
            self._send_batch(Batch(topic, (self._form.all_cleared(),)))

    def _first_number(self) -> int:
        """Above all numbers of earlier lives: readers take lower ones for messages that they have seen. A jump is a gap to
        them, so that they ask at replay and get AllBlocksCleared first."""
        return int(self._wall_time_s() * NUMBERS_PER_S)

    def _send(self, outgoing: Outgoing) -> None:
        for batch in batches(outgoing):
            self._begin(batch.topic)
            self._send_batch(batch)

    def _send_batch(self, batch: Batch) -> None:
        self._steps += 1
        number = self._numbers.pop(batch.topic)
        self._numbers[batch.topic] = (
            number + 1
        )  # moved to the end: the first topic is the one that was quiet for longest
        message = (batch.topic.encode(), NUMBER.pack(number), batch.payload(self._wall_time_s()))
        self._sockets.buffer.append(message)
        self._sockets.send(message)
        self._messages += 1
        self._events += len(batch.events)

    def _send_marks(self) -> None:
        """Send an empty message with the latest number of every topic: a new router sees that it lacks messages, others have
        seen that number."""
        for topic, number in self._numbers.items():
            self._sockets.send((topic.encode(), NUMBER.pack(number - 1), Batch(topic, ()).payload(self._wall_time_s())))
