"""Load of a layout with groups: a load of each group, which is complete only when all are. Used from one thread at a time, as a
Load is."""

from collections.abc import Callable, Sequence
from types import TracebackType

from kvpool.clock import Deadline
from kvpool_client.arguments import as_index
from kvpool_client.grouped.leases import GroupLease
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import LoadResult


class GroupLoad:
    """A load into the caches of all groups, running or ended: what `Pool.groups.load` answers. Nothing raises because of the
    daemon: its result is shorter.

    Leaving it as a context waits for it, or cancels it where an exception leaves it. Threads: one at a time.
    """

    def __init__(
        self,
        lease: GroupLease,
        loads: Sequence[Load],
        layers: Sequence[int],
        *,
        first_chunk: int,
        on_end: Callable[[GroupLease, LoadResult], None],
    ) -> None:
        """`loads`: of each group, from `first_chunk` on where it is full; `layers`: how many the engine has of each."""
        self.lease = lease
        self.first_chunk = first_chunk
        self._loads = tuple(loads)
        self._layers = layers
        self._on_end = on_end
        self._result: LoadResult | None = None

    def __repr__(self) -> str:
        return f"<GroupLoad {self._result.reason if self._result else 'running'} of {len(self._loads)} groups>"

    def __enter__(self) -> "GroupLoad":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.cancel()
        self.wait()

    def wait_layer(self, group: int, layer: int, timeout_s: float | None = None) -> bool:
        """True when all of a group's layer is in place and verified, False when some of it failed. Ended where it makes no
        progress for the Pool's timeout, or is not complete after `timeout_s` seconds. Raises InvalidArgument."""
        group = as_index("group", group, len(self._loads) - 1)
        layer = as_index("layer", layer, self._layers[group] - 1)
        load = self._loads[group]
        if load.done() and load.wait().reason == "complete":  # also where the engine had all of it
            return True
        return load.wait_layer(layer, timeout_s) and load.chunks_so_far == load.lease.chunks

    def done(self) -> bool:
        """Whether it has ended."""
        return all(load.done() for load in self._loads)

    def wait(self, timeout_s: float | None = None) -> LoadResult:
        """The result. Where any group is not complete nothing but what the engine held before counts: a prompt goes on from its
        last chunk only with all groups. The reason is that of the first group that failed."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        watched = [(load, load.watch()) for load in self._loads]
        results = [load.wait_watched(stall, deadline) for load, stall in watched]
        if self._result is None:
            failed = next((result.reason for result in results if result.reason != "complete"), "complete")
            chunks = self.lease.chunks if failed == "complete" else self.first_chunk
            self._result = LoadResult(chunks, chunks * self.lease.hold.layout.chunk_tokens, failed)
            self._on_end(self.lease, self._result)
        return self._result

    def cancel(self) -> None:
        """End the load. After it returns no byte is written to engine memory."""
        for load in self._loads:
            load.cancel()
