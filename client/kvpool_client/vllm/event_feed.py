"""Event feed: the pool's chunks as events in vLLM's own stream.

    daemon's log ──a thread asks──► cut into batches ──`take_batch`, one a step──► vLLM's publisher
       a gap ──► AllBlocksCleared (if anything was published before), then all stored chunks, parents before children
    vLLM's own AllBlocksCleared, after a reset of its prefix cache ──► all stored chunks again

The scheduler takes what is ready and never waits. At most BATCHES_MAX batches are ready: then the thread stops reading, and an
engine that is idle for long gets a gap. Blocks are the engine's, named as the daemon's own publisher names them
(`router_events/vllm_format.py`). Level 0 is left out: the engine's own events have it. Invariant: a reader that
applies all batches has the pool's state at the last one.

The reading thread, but for `take_batch` and `stop`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kvpool.errors import KVPoolError
from kvpool.events import Event, StoredChunk
from kvpool.layout import Layout
from kvpool.router_events.columns import NamespaceNames
from kvpool.router_events.snapshot_order import SnapshotOrder
from kvpool.router_events.vllm_format import EventForm, TokenIds, WireEvent, batches
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.events import BEGINNING, EventMark
from kvpool_client.pool import Pool
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.surface import EngineConfig

# A batch is 64 KiB at most: up to 4 MiB are ready here, the rest waits in the daemon's log.
BATCHES_MAX = 64
# Polling interval after the last new event: this delay does not matter to a router (guess).
POLL_S = 0.1
# Pause after a failed snapshot, which is work for the daemon (guess).
RETRY_S = 1.0
# The thread checks for the stop between pages: a page's round trip may still be running, and an engine that ends does not wait
# for a daemon.
STOP_TIMEOUT_S = 2.0
# Chunks of a snapshot that wait for their parents.
ORPHANS_MAX = 1 << 16

# Builds the engine's own event from a name and its fields.
MakeEvent = Callable[[str, Mapping[str, object]], object]


def _maker_of(events: object, group: int | None = None) -> MakeEvent:
    """What builds the events of vLLM's module of them, with the fields that this release has. `group`: the number of vLLM's KV
    cache group whose chunks they are, in an engine that has several."""
    of_group = {} if group is None else {"group_idx": group}

    def make(name: str, fields: Mapping[str, object]) -> object:
        kind = getattr(events, name)
        fields = {**fields, **of_group} if fields else fields  # those of no chunk have none
        known = getattr(kind, "__struct_fields__", fields)
        event: object = kind(**{field: value for field, value in fields.items() if field in known})
        return event

    return make


class EventFeed:
    """See the module. `pool` is the feed's own, and closed by its thread."""

    def __init__(self, pool: Pool, make: MakeEvent, block_tokens: int, guard: FailureGuard) -> None:
        self._pool = pool
        self._make = make
        self._form = EventForm(block_tokens=block_tokens, has_engine_level=False)
        self._guard = guard
        self._changed = threading.Condition()
        self._ready: deque[list[object]] = deque()  # guarded by _changed
        self._is_stopping = False  # guarded by _changed
        self._is_cleared = False  # guarded by _changed
        self._mark = BEGINNING
        self._unread: deque[Event] = deque()
        self._names: NamespaceNames = {}
        self._has_published = self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<EventFeed up to {self._mark.last}, {len(self._ready)} batches ready>"

    def take_batch(self) -> list[object]:
        """The next batch, if one is ready."""
        with self._changed:
            if not self._ready:
                return []
            self._changed.notify()
            return self._ready.popleft()

    def republish(self) -> None:
        """vLLM has published that all blocks are cleared, its own and the pool's: everything is published again behind that."""
        with self._changed:
            self._ready.clear()
            self._is_cleared = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, which closes the Pool. Waits for at most STOP_TIMEOUT_S; a running call ends on its own."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._pool.close()

    def _follow(self) -> None:
        while not self._is_stopping:
            has_backlog = self._guard.call("reading events", None, self._turn)
            # It is unknown which events of a failed turn were published: everything is published again.
            self._is_lost = self._is_lost or has_backlog is None
            pause_s = RETRY_S if self._is_lost else 0.0 if has_backlog else POLL_S
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping, pause_s)

    def _turn(self) -> bool:
        """Publish some new events; whether there may be more."""
        with self._changed:
            is_cleared, self._is_cleared = self._is_cleared, False
        if is_cleared:
            self._has_published = False
        if is_cleared or self._is_lost or not self._read():
            self._is_lost = not self._queue_snapshot()
            return not self._is_lost
        return self._queue_unread(self._mark)

    def _read(self) -> bool:
        """Read some events; False where some are lost."""
        batch = self._pool.events(self._mark)
        if batch.is_gap:
            return False
        self._unread += batch.events
        self._names.update(batch.namespaces)
        self._mark = batch.mark
        return True

    def _queue_unread(self, up_to: EventMark, order: SnapshotOrder | None = None) -> bool:
        """Publish the events that were read, up to a mark; whether there were any."""
        events = []
        while self._unread and self._unread[0].id <= up_to.last:
            events.append(self._unread.popleft())
        if order is not None:
            order.note_events(events)
        self._queue_events(wire for event in events for wire in self._wire(event))
        return bool(events)

    def _queue_snapshot(self) -> bool:
        """Publish a snapshot. False where it is incomplete: the daemon went away, or the log was overrun."""
        self._unread.clear()
        self._names = {}
        self._form.forget_published()
        if self._has_published:
            self._queue_events([self._form.all_cleared()])
            self._has_published = False
        order, is_first = SnapshotOrder(ORPHANS_MAX), True
        try:
            for part in self._pool.snapshot():
                if self._is_stopping:
                    return False
                if is_first:
                    self._mark, is_first = part.mark, False
                self._names.update(part.namespaces)
                if not self._catch_up(part.mark, order):
                    return False
                self._queue_chunks(order.admit(part.chunks))
        except KVPoolError:
            return False  # the Pool has counted it, and reconnects
        self._queue_chunks(order.rest())
        return not is_first

    def _catch_up(self, mark: EventMark, order: SnapshotOrder) -> bool:
        """Publish events up to the mark of a part, and none after it: the part would contradict them."""
        while self._mark.last < mark.last:
            before = self._mark
            if not self._read() or self._mark == before or self._is_stopping:
                return False
        self._queue_unread(mark, order)
        return self._mark.incarnation == mark.incarnation

    def _queue_chunks(self, chunks: Iterable[StoredChunk]) -> None:
        self._queue_events(
            wire for chunk in chunks for wire in self._form.chunk_events(chunk, *self._names[chunk.namespace])
        )

    def _wire(self, event: Event) -> list[WireEvent]:
        name = self._names.get(event.namespace)
        return [] if name is None else self._form.events_of(event, *name)

    def _queue_events(self, events: Iterable[WireEvent]) -> None:
        """Queue events for the scheduler, batch by batch, each when there is room."""
        for batch in batches([("", list(events))]):
            made = [self._made(event) for event in batch.events]
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._is_cleared or len(self._ready) < BATCHES_MAX)
                if self._is_stopping or self._is_cleared:
                    return
                self._ready.append(made)
            self._has_published = True

    def _made(self, event: WireEvent) -> object:
        assert isinstance(event, dict)
        fields = {name: value.tolist() if isinstance(value, TokenIds) else value for name, value in event.items()}
        kind = str(fields.pop("type"))
        return self._make(kind, fields)


def feed_of(
    config: EngineConfig, geometry: Geometry, guard: FailureGuard, connect: Callable[[Layout], Pool]
) -> EventFeed | None:
    """The feed of an engine that publishes events, with a connection of its own, so that no answer of a megabyte delays a
    lookup's; None where vLLM publishes none."""
    if not getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False):
        guard.warn_once("kvpool.events is on and vLLM's KV events are not", "the pool's are published to nobody")
        return None
    from vllm.distributed import kv_events  # the engine that asks for it

    part = geometry.event_part
    make = _maker_of(kv_events, part.table if geometry.layout.groups else None)
    return EventFeed(connect(geometry.layout), make, part.block_tokens, guard)
