"""Catalogue book: turns changes of the tier's directory into rows of the catalogue, and rows back into chunks at the start.

Rows are of published chunks with their last use and retention, and of namespaces. Every call gets the disk to write to, open or
not. Control thread only.

Invariant: the row of every key that has left the directory is removed before another row is written.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from kvpool import failpoint
from kvpool.clock import Clock
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.key_column import KeyColumn
from kvpool.tiers.base import Moves
from kvpool.tiers.slots import Slots
from kvpool.tiers.ssd.catalogue.numbers import NamespaceNumbers
from kvpool.tiers.ssd.catalogue.restore_rows import pack_restore_rows
from kvpool.tiers.ssd.catalogue.rows import Row, Touch
from kvpool.tiers.ssd.opened import ClosedSsd, OpenSsd
from kvpool.tiers.ssd.opening import Recovered
from kvpool.types import DEFAULT_PRIORITY

log = logging.getLogger(__name__)

RESTORE_ROWS = 2048
MS_PER_S = 1000
Disk = OpenSsd | ClosedSsd


class CatalogueBook:
    """See the module. `restored_chunks`: chunks of earlier processes that were restored; `unrestored_chunks`: those that were
    not, as their slots do not fit the layouts and sizes of now."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._numbers = NamespaceNumbers()
        self._recency = 0  # the greatest one in use
        self.restored_chunks = 0
        self.unrestored_chunks = 0

    def __repr__(self) -> str:
        return f"<CatalogueBook of {self._slots!r}, {self.restored_chunks} chunks restored>"

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"ssd.restored_chunks": self.restored_chunks, "ssd.unrestored_chunks": self.unrestored_chunks}

    def remember(self, disk: Disk, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Write the rows of published chunks of a job."""
        if not chunks:
            return
        self.forget_departed(disk)
        extents, extent_bytes = namespace.layout.extents, namespace.layout.extent_bytes
        number = self._numbers.find(namespace)
        if number is None:
            number = self._numbers.give(namespace)
            disk.remember_namespace(number, (namespace.model, namespace.layout.to_wire()))
        for chunk in chunks:
            key, recency = moves.keys[chunk], self._next_recency()
            place = (moves.offsets[chunk], moves.generations[chunk], recency, extent_bytes, extents, number)
            disk.remember(Row(key, moves.parents[chunk], *place, *self._retained(key)))

    def touch(self, disk: Disk, key: bytes) -> None:
        """Write a chunk's new last use and retention."""
        disk.touch(key, Touch(self._next_recency(), *self._retained(key)))

    def keep_up(self, disk: Disk) -> None:
        """Remove rows of chunks that have left, and write expired priorities: a restart would else raise them again."""
        self.forget_departed(disk)
        for key in KeyColumn(self._slots.directory.take_expired()):
            if self._slots.directory.retention(key) is not None:
                self.touch(disk, key)

    def forget_namespace(self, disk: Disk, namespace: Namespace) -> None:
        """Remove the record of a namespace without chunks."""
        self.forget_departed(disk)
        number = self._numbers.take(namespace)
        if number is not None:
            disk.forget_namespace(number)

    def forget_departed(self, disk: Disk) -> None:
        """Remove the rows of chunks that have left the directory."""
        for key in KeyColumn(self._slots.directory.take_departed()):
            disk.forget(key)

    async def restore(self, disk: Disk, recovered: Recovered, namespaces: Namespaces, clock: Clock) -> None:
        """Restore the chunks of earlier processes into the directory, part by part."""
        self._recency = max(self._recency, recovered.last_recency)
        numbers, without_rows = self._numbers.reopen(recovered.namespaces, recovered.rows, namespaces)
        try:
            for number in without_rows:
                disk.forget_namespace(number)
            packed = pack_restore_rows(recovered.rows, numbers, lambda one: self._slots.size_class_of(one.layout))
            for first in range(0, len(packed), RESTORE_ROWS):
                failpoint.reach("daemon.ssd.restore")
                part = packed[first : first + RESTORE_ROWS]
                answer = self._slots.directory.restore(part.tobytes(), clock.now_ns())
                is_restored = np.frombuffer(answer, np.uint8)
                self.restored_chunks += int(is_restored.sum())
                self.unrestored_chunks += int((is_restored == 0).sum())
                for lost in np.flatnonzero(is_restored == 0):
                    disk.forget(bytes(part["key"][lost]))
                await asyncio.sleep(0)
            self._slots.directory.finish_restore(recovered.generation)
            if self.unrestored_chunks:
                log.warning(
                    "%d chunks on disk are set aside: their slots do not fit the layouts and sizes of now, or what is before "
                    "them in their prompts is not there",
                    self.unrestored_chunks,
                )
        finally:
            namespaces.leave(numbers.values())

    def _retained(self, key: bytes) -> tuple[int, int]:
        """A chunk's priority and its duration in whole seconds, as a row has them."""
        priority, duration_ms = self._slots.directory.retention(key) or (DEFAULT_PRIORITY, 0)
        return priority, -(-duration_ms // MS_PER_S)

    def _next_recency(self) -> int:
        """A number greater than all before it."""
        self._recency += 1
        return self._recency
