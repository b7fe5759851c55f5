"""Catalogue book: turns changes of the tier's directory into rows of its catalogue, and rows back into chunks at the start.

Rows are of published chunks with their last use and retention, and of namespaces. A namespace's number in the rows stays the
same over restarts. It exists while the tier is open. Control thread only, except `checkpoint`, `note_flushed` and `close`,
which block and belong in an executor.

Invariant: the row of every key that has left the directory is removed before another row is written.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool import failpoint
from kvpool.clock import Clock, Stopwatch
from kvpool.errors import KVPoolError
from kvpool.ids import NamespaceId
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.states import DEFAULT_PRIORITY
from kvpool.tiers.base import Counters, Moves
from kvpool.tiers.slots import Slots
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import NamespaceRecord
from kvpool.tiers.ssd.catalogue.rows import MS_PER_S, Row, Touch, pack_restore_rows
from kvpool.tiers.ssd.flushed import FlushFloors
from kvpool.tiers.ssd.opened import CLOSE_TIMEOUT_S

log = logging.getLogger(__name__)

RESTORE_ROWS = 2048


class CatalogueBook:
    """See the module. `catalogue`: has the rows; `floors`: what operators have dropped."""

    def __init__(self, slots: Slots, catalogue: Catalogue, floors: FlushFloors) -> None:
        self.catalogue = catalogue
        self._slots = slots
        self._floors = floors
        self._flushing = Stopwatch()
        self._numbers: dict[
            NamespaceId, int
        ] = {}  # of each namespace that has had a row in this process or the one before
        self._last_number = 0
        self._recency = 0  # the greatest one in use
        self.restored_chunks = 0
        self._unrestored_chunks = 0

    def __repr__(self) -> str:
        return f"<CatalogueBook of {self._slots!r}, {self.restored_chunks} chunks restored>"

    @property
    def waits(self) -> tuple[tuple[str, float], ...]:
        """What waits for the disk, and seconds so far."""
        return ("the catalogue", self.catalogue.busy.elapsed_s), ("a flush", self._flushing.elapsed_s)

    @property
    def flush_failure(self) -> str:
        """Why the last flush is not durable; empty where it is."""
        return self._floors.failure

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Write the rows of published chunks of a job."""
        if not chunks:
            return
        self._forget_departed()
        extents, extent_bytes = namespace.layout.extents, namespace.layout.extent_bytes
        number = self._numbers.get(namespace.id)
        if number is None:
            number = self._last_number = self._numbers[namespace.id] = self._last_number + 1
            self.catalogue.put_namespace(number, (namespace.model, namespace.layout.to_wire()))
        for chunk in chunks:
            key, recency = moves.keys[chunk], self._next_recency()
            place = (moves.offsets[chunk], moves.generations[chunk], recency, extent_bytes, extents, number)
            self.catalogue.put(Row(key, moves.parents[chunk], *place, *self._retained(key)))

    def touch(self, key: bytes) -> None:
        """Write a chunk's new last use and retention."""
        self.catalogue.touch(key, Touch(self._next_recency(), *self._retained(key)))

    def keep_up(self) -> None:
        """Remove rows of chunks that have left, and write expired priorities: a restart would else raise them again."""
        self._forget_departed()
        for key in KeyColumn(self._slots.directory.take_expired()):
            if self._slots.directory.retention(key) is not None:
                self.touch(key)

    def forget_namespace(self, namespace: Namespace) -> None:
        """Remove the record of a namespace without chunks. Its number is not used again."""
        self._forget_departed()
        number = self._numbers.pop(namespace.id, None)
        if number is not None:
            self.catalogue.delete_namespace(number)

    def note_flushed(self, fingerprints: Sequence[bytes] | None, generation: int | None) -> bool:
        """Record that an operator has dropped chunks; whether that is durable. `settle_flushed` follows. Blocks; any thread."""
        with self._flushing.running():
            if generation is None:
                return self.catalogue.checkpoint(CLOSE_TIMEOUT_S)
            return self._floors.note_flush(fingerprints, generation)

    def settle_flushed(self) -> None:
        """Queue the number of the last flush, behind its removals."""
        self.catalogue.put_flushes(self._floors.sequence)

    async def restore(
        self,
        rows: npt.NDArray[np.void],
        records: dict[int, NamespaceRecord],
        last_generation: int,
        *,
        namespaces: Namespaces,
        clock: Clock,
    ) -> None:
        """Restore the chunks of earlier processes into the directory, part by part. `records`: of the namespaces, by the
        numbers in the rows; `last_generation`: the greatest one in use."""
        if len(rows):
            self._recency = int(rows["recency"].max())
        numbers = self._reopen(records, set(np.unique(rows["namespace"]).tolist()), namespaces)
        try:
            packed = pack_restore_rows(rows, numbers, lambda one: self._slots.size_class_of(one.layout))
            for first in range(0, len(packed), RESTORE_ROWS):
                failpoint.reach("daemon.ssd.restore")
                part = packed[first : first + RESTORE_ROWS]
                answer = self._slots.directory.restore(part.tobytes(), clock.now_ns())
                is_restored = np.frombuffer(answer, np.uint8)
                self.restored_chunks += int(is_restored.sum())
                self._unrestored_chunks += int((is_restored == 0).sum())
                for lost in np.flatnonzero(is_restored == 0):
                    self.catalogue.delete(bytes(part["key"][lost]))
                await asyncio.sleep(0)
            self._slots.directory.finish_restore(last_generation)
            if self._unrestored_chunks:
                log.warning(
                    "%d chunks on disk are set aside: their slots do not fit the layouts and sizes of now, or what is before "
                    "them in their prompts is not there",
                    self._unrestored_chunks,
                )
        finally:
            namespaces.leave(numbers.values())

    def close(self) -> bool:
        """Write what is left. Blocks, but not for ever: False where the disk did not answer in time."""
        has_floors = self._floors.write(CLOSE_TIMEOUT_S)
        if not has_floors:
            log.error(
                "a restart may bring back what was flushed: the file of flushes is not written within %g s",
                CLOSE_TIMEOUT_S,
            )
        return self.catalogue.close(CLOSE_TIMEOUT_S) and has_floors

    def _reopen(
        self, records: dict[int, NamespaceRecord], with_rows: set[int], namespaces: Namespaces
    ) -> dict[int, Namespace]:
        """The namespaces of earlier processes that have rows, by number; the records of the others are removed.

        Joins them for the caller, who leaves them after their chunks were restored.
        """
        reopened: dict[int, Namespace] = {}
        for number, (model, wire) in records.items():
            self._last_number = max(self._last_number, number)
            if number not in with_rows:
                self.catalogue.delete_namespace(number)
                continue
            try:
                namespace = namespaces.open(model, Layout.from_wire(wire))
            except KVPoolError as error:
                log.warning("chunks of model %s are not restored: %s", model, error)
            else:
                reopened[number] = namespace
                self._numbers[namespace.id] = number
                namespaces.join([namespace])
        return reopened

    def _forget_departed(self) -> None:
        """Remove the rows of chunks that have left the directory."""
        for key in KeyColumn(self._slots.directory.take_departed()):
            self.catalogue.delete(key)

    def _retained(self, key: bytes) -> tuple[int, int]:
        """A chunk's priority and its duration in whole seconds, as a row has them."""
        priority, duration_ms = self._slots.directory.retention(key) or (DEFAULT_PRIORITY, 0)
        return priority, -(-duration_ms // MS_PER_S)

    def _next_recency(self) -> int:
        """A number greater than all before it."""
        self._recency += 1
        return self._recency

    @staticmethod
    def counters(book: "CatalogueBook | None") -> Counters:
        """Counters, by name: zeros where there is no book yet."""
        catalogue = None if book is None else book.catalogue
        return {
            "ssd.restored_chunks": 0 if book is None else book.restored_chunks,
            "ssd.unrestored_chunks": 0 if book is None else book._unrestored_chunks,
            "ssd.waiting_rows": 0 if catalogue is None else catalogue.waiting,
            "ssd.checkpoints": 0 if catalogue is None else catalogue.checkpoints,
            "ssd.dropped_rows": 0 if catalogue is None else catalogue.dropped_rows,
            "ssd.lost_rows": 0 if catalogue is None else catalogue.lost_rows,
        }
