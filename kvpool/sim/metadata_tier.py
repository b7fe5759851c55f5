"""A slower tier without bytes, in the place of `tiers.ssd.SsdTier`: every read and write succeeds, and at once.

It has what `Tiering` asks of a tier that is open. What was started is reported by the next `take_outcomes`. Nothing of it
outlives it, so what should survive a restart is not noted. One thread.
"""

from collections import deque
from dataclasses import dataclass

import kvpool_native
from kvpool.packed_rows import MOVE_ROW
from kvpool.tiers.ssd.plan import OUTCOMES_AT_ONCE
from kvpool.tiers.ssd.status import SsdStatus


@dataclass(frozen=True, slots=True)
class OneSegment:
    """The sizes of a tier in which each chunk size has one segment."""

    segment_bytes: int


class MetadataTier:
    """A tier of `blocks` slots for chunks of `chunk_bytes`, or so much of each of several sizes up to that (`segments`)."""

    can_read = True
    can_write = True
    can_be_tried_again = False
    is_answering = True

    def __init__(self, blocks: int, chunk_bytes: int, *, segments: int = 1) -> None:
        slot_bytes = chunk_bytes + kvpool_native.SSD_HEADER_BYTES
        self.plan = OneSegment(blocks * slot_bytes)
        geometry = kvpool_native.DirectoryGeometry.plan_files(self.plan.segment_bytes, segments, segments * blocks)
        self.directory = kvpool_native.Directory.of_files(geometry)
        for segment in range(segments):
            self.directory.mark_segment_ready(segment)
        self._jobs = 0
        self._recency = 0
        self._outcomes: deque[tuple[int, int, SsdStatus, bytes]] = deque()

    def __repr__(self) -> str:
        return f"<MetadataTier {self._jobs} jobs, {len(self._outcomes)} to report>"

    def read(self, rows: bytes, namespace: bytes, layers: int, layer_bytes: int, *, is_urgent: bool) -> int:  # noqa: ARG002
        """Every chunk has landed."""
        return self._start(rows)

    def write(self, rows: bytes, namespace: bytes, layers: int, layer_bytes: int, tokens: list[bytes]) -> int:  # noqa: ARG002
        """Every chunk is written."""
        return self._start(rows)

    def take_outcomes(self) -> list[tuple[int, int, SsdStatus, bytes]]:
        """(job, chunk, OK, no token ids) for each chunk of the jobs started, as many at a time as a tier of files has."""
        return [self._outcomes.popleft() for _ in range(min(OUTCOMES_AT_ONCE, len(self._outcomes)))]

    @property
    def has_outcomes(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._outcomes)

    def next_recency(self) -> int:
        """Numbers that rise."""
        self._recency += 1
        return self._recency

    def remember_namespace(self, number: int, record: object) -> None:
        """Nothing is to be known after a restart."""

    def remember(self, row: object) -> None:
        """Nothing is to be known after a restart."""

    def touch(self, key: bytes, priority: int, duration_s: int) -> None:
        """Nothing is to be known after a restart."""

    def forget(self, key: bytes) -> None:
        """Nothing was remembered."""

    def _start(self, rows: bytes) -> int:
        self._jobs += 1
        self._outcomes += [(self._jobs, chunk, SsdStatus.OK, b"") for chunk in range(len(rows) // MOVE_ROW.itemsize)]
        return self._jobs
