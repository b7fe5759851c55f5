"""Takeover: a former life's chunks become this one's, where they lie. Control thread only, before anybody is served.

Namespaces are opened anew from the former book, under numbers of this life; the native directory reads the former records. No
byte of payload is read: each load compares checksums as ever.
"""

import logging
from dataclasses import dataclass, fields

import kvpool_native
from kvpool.clock import Clock
from kvpool.errors import KVPoolError
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.tiers.dram.kept.former import FormerMemory
from kvpool.units import format_size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Takeover:
    """What became of a former life's chunks, each counted once. `withheld`: slots that somebody may still write to."""

    taken: int = 0
    taken_bytes: int = 0
    withheld: int = 0
    withheld_bytes: int = 0
    unfinished: int = 0
    damaged: int = 0
    unpublished: int = 0
    unknown: int = 0
    orphaned: int = 0
    unplaced: int = 0

    def describe(self) -> str:
        """On one line."""
        left = {
            field.name: getattr(self, field.name) for field in fields(self)[2:] if not field.name.endswith("_bytes")
        }
        shown = ", ".join(f"{count} {name}" for name, count in left.items() if count)
        return f"{self.taken} chunks, {format_size(self.taken_bytes)}" + (f"; not taken: {shown}" if shown else "")


def take_over(
    former: FormerMemory, directory: kvpool_native.Directory, namespaces: Namespaces, clock: Clock
) -> Takeover:
    """Take over what is consistent, and drop the rest."""
    opened: list[Namespace] = []
    numbers: list[int | None] = [None] * (max(former.book.namespaces, default=-1) + 1)
    try:
        for number, (model, layout) in former.book.namespaces.items():
            try:
                namespace = namespaces.open(model, layout)
            except KVPoolError as error:
                log.warning("chunks of model %s are not taken over: %s", model, error)
                continue
            namespaces.join([namespace])  # in use, so that it is not given back for the next one
            opened.append(namespace)
            numbers[number] = int(namespace.id)
        counts = directory.restore_former(former.index, former.records, numbers, clock.now_ns())
    finally:
        namespaces.leave(opened)
    return Takeover(**{field.name: getattr(counts, field.name) for field in fields(Takeover)})
