"""Row store: finds, loads and saves rows of vLLM's host region in kvpool, a job's at a time.

vLLM names what a row has by a key of its own, a hash over everything before it and the number of a group of layers: rows are a
set of chunks without parents. One request leases rows and one native job loads them (`engines/set_loads`), two requests save
them. What is saved keeps the beginning of a prompt the most recently used, so that eviction begins at its end.

Bounded: a job ends within `batch_timeout_s`, and sooner after `give_up`. When a call has returned, nothing reads or writes a
row. Any thread; the tier calls from a thread for loads and another one for saves. Copies per byte: one, by the Pool's native
threads.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import Deadline
from kvpool.layout import Layout
from kvpool.states import DRAM, TokenRange
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.lease_size import chunks_at_once
from kvpool_client.engines.set_loads import SetLoads
from kvpool_client.named_keys import Names
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import SaveResult
from kvpool_client.vllm.identity.weight_epoch import FIRST_EPOCH, hash_in_epoch
from kvpool_client.vllm.tier.settings import Settings

SAVES_AT_ONCE = 128
# Keys that are used again in one request.
USES_AT_ONCE = 4096
Addresses = npt.NDArray[np.int64]


def name_of(key: bytes, epoch: bytes = FIRST_EPOCH) -> bytes:
    """The name of a chunk, 32 bytes, from vLLM's key and the weight epoch that it belongs to."""
    return hash_in_epoch(epoch, key) if epoch else kvpool_native.blake3(key)


def names_of(keys: Sequence[bytes], epoch: bytes = FIRST_EPOCH) -> Names:
    """The same of many, uint8 [keys, 32]."""
    packed = b"".join([name_of(key, epoch) for key in keys])
    return np.frombuffer(packed, np.uint8).reshape(len(keys), -1)


class RowStore:
    """See the module. A namespace and a connection of its own."""

    def __init__(self, settings: Settings, guard: FailureGuard, *, model: str, revision: str, layout: Layout) -> None:
        """Connects. Raises InvalidArgument, LayoutMismatch."""
        self._settings = settings
        self._pool = Pool(
            settings.socket,
            model=model,
            revision=revision,
            layout=layout,
            salt=settings.salt.encode(),
            timeout_s=settings.timeout_s,
            copy_threads=settings.copy_threads,
            name=connection_name("vllm tier", layout.rank, layout.world),
        )
        self._lock = threading.Lock()
        self._loads: set[Load] = set()  # guarded by _lock
        self._set_loads = SetLoads(self._pool, guard, timeout_s=settings.timeout_s)
        self._saves_at_once = chunks_at_once(layout, SAVES_AT_ONCE)
        self._giving_up = threading.Event()  # changed under _lock

    def __repr__(self) -> str:
        return f"<RowStore {self._pool!r}>"

    @property
    def model(self) -> str:
        """The model's name in the daemon's pool."""
        return self._pool.model

    def level_of(self, name: bytes) -> int:
        """The level of one chunk; 0 where it is not known to be anywhere. No request."""
        return int(self._pool.probe(np.frombuffer(name, np.uint8).reshape(1, -1), is_counted=True)[0])

    def load(self, names: Names, addresses: Addresses) -> list[str]:
        """Copy chunks into rows. A state for each: "complete" for one that is in place and verified, else why it is not; its
        row is undefined."""
        deadline = Deadline(self._settings.batch_timeout_s)

        def load_part(lease: Lease, places: npt.NDArray[np.intp]) -> list[str]:
            with self._pool.load_set(lease, addresses[places]) as load:
                self._begin(load)
                states = load.wait(deadline.remaining_s()).states
                self._end(load)
            return list(states)

        return self._set_loads.load(names, load_part, deadline=deadline, stop=self._giving_up)

    def save(self, names: Names, addresses: Addresses, retention: Sequence[TokenRange | None]) -> list[SaveResult]:
        """Store chunks from rows. The results of the saves, in an order of their own; fewer where the time is over.

        `names`: from the beginning of a prompt on. `retention`: of each, None for none. What is there already is used again.
        """
        results, tokens = [], self._pool.layout.chunk_tokens
        deadline = Deadline(self._settings.batch_timeout_s)
        for first in reversed(range(0, len(names), self._saves_at_once)):
            if self._is_over(deadline):
                break
            asked = slice(first, first + self._saves_at_once)
            ranges = tuple(
                TokenRange(row * tokens, (row + 1) * tokens, one.priority, one.duration_s)
                for row, one in enumerate(retention[asked])
                if one is not None
            )
            with self._pool.save_set(names[asked], addresses[asked], retention=ranges) as save:
                results.append(save.commit())
        return results

    def use_again(self, names: Names) -> int:
        """Have these chunks, from the beginning of a prompt on, count as used now, the first one last; how many of them DRAM
        has, where alone that matters."""
        used = 0
        for first in reversed(range(0, len(names), USES_AT_ONCE)):
            asked = names[first : first + USES_AT_ONCE]
            with self._pool.acquire_set(asked[self._pool.probe(asked) == DRAM]) as lease:
                used += lease.chunks
        return used

    def give_up(self, *, is_over: bool) -> None:
        """Have running jobs end soon, with what they have done; until it is `over`."""
        with self._lock:
            (self._giving_up.clear if is_over else self._giving_up.set)()
            loads = [] if is_over else list(self._loads)
        for load in loads:
            load.cancel()

    def stats(self) -> dict[str, int | float | str]:
        """The Pool's counters."""
        return self._pool.stats()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._pool.close()
        self._set_loads.close()

    def _begin(self, load: Load) -> None:
        with self._lock:
            self._loads.add(load)
            is_late = self._giving_up.is_set()
        if is_late:
            load.cancel()

    def _end(self, load: Load) -> None:
        with self._lock:
            self._loads.discard(load)

    def _is_over(self, deadline: Deadline) -> bool:
        return self._giving_up.is_set() or deadline.has_passed()
