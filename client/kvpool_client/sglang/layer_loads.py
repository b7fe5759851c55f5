"""Layer loads: the loads of one of SGLang's batches, for which its forward waits layer by layer.

    queued ──start──► running ──wait_until(layer)…──► finish: whether every page is in place
       └─cancel: its promise ends          └─cancel_all: nothing writes to the device any more

SGLang asks this object for each layer from the thread that runs the forward, and gives a batch up as a whole where one of its
pages is not in place. Nothing raises into the forward. One thread at a time, which is SGLang's scheduler thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.sglang.promises import Promise, StartedLoad

NOTHING = -1
FAILED = "promised pages are not there any more"


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """Pages of a request, by pool, and the engine's pages for them. `promise`: has them leased; None: it failed before."""

    promise: Promise | None
    pools: Mapping[str, tuple[Sequence[str], Sequence[int]]]


class LayerLoads:
    """See the module. SGLang knows it as the counter of layers."""

    def __init__(self, guard: FailureGuard) -> None:
        self._guard = guard
        self._queued: dict[str, QueuedLoad] = {}
        self._running: dict[int, tuple[list[StartedLoad], list[QueuedLoad]]] = {}
        self._failed: set[int] = set()
        self._last = NOTHING
        self._consumer = NOTHING

    def queue(self, rid: str, queued: QueuedLoad) -> None:
        """A request's load begins with the next batch."""
        self.cancel(rid)
        self._queued[rid] = queued

    def cancel(self, rid: str) -> bool:
        """Whether a load was queued that does not begin now."""
        queued = self._queued.pop(rid, None)
        if queued is not None and queued.promise is not None:
            queued.promise.release()
        return queued is not None

    def start(self) -> int:
        """Begin what is queued. Returns the batch's number, NOTHING where nothing is queued."""
        batch, self._queued = list(self._queued.values()), {}
        if not batch:
            return NOTHING
        self._last += 1
        started: list[StartedLoad] = []
        self._running[self._last] = started, batch
        for queued in batch:
            if queued.promise is None or not self._guard.call("load", False, self._begin, queued, started):
                self._failed.add(self._last)
        return self._last

    def set_consumer(self, index: int) -> None:
        """The forward that begins now waits for this batch; NOTHING: for none."""
        self._consumer = index

    def wait_until(self, layer: int) -> None:
        """Wait until the consumer's batch has this layer of the engine's in place, or has failed: `finish` has the answer."""
        started, _ = self._running.get(self._consumer, ((), ()))
        for load in started:
            if not self._guard.call("wait_until", False, load.wait_until, layer):
                self._failed.add(self._consumer)

    def finish(self, index: int) -> bool:
        """Wait until a batch's loads have ended. Whether every page is in place; of a batch that does not run none is."""
        if index not in self._running:
            return False
        started, batch = self._running.pop(index)
        failures = [self._guard.call("load", "failed", load.failure) for load in started]
        if index in self._failed:
            self._failed.discard(index)
            failures.append(FAILED)
        for queued in batch:
            if queued.promise is not None:
                queued.promise.release()
        for failure in filter(None, failures):
            self._guard.miss("load", failure)
        return not any(failures)

    def cancel_all(self) -> None:
        """End every load. When it has returned, nothing is written to the engine's pages."""
        for rid in list(self._queued):
            self.cancel(rid)
        for started, batch in self._running.values():
            for load in started:
                load.load.cancel()
                load.load.wait()
            for queued in batch:
                if queued.promise is not None:
                    queued.promise.release()
        self._running.clear()
        self._failed.clear()
        self._consumer = NOTHING

    @staticmethod
    def _begin(queued: QueuedLoad, started: list[StartedLoad]) -> bool:
        assert queued.promise is not None
        for name, (keys, numbers) in queued.pools.items():
            started += queued.promise.pools[name].begin_loads(keys, numbers)
        return True
