"""Plan of the device tier: how its memory is cut. Pure; any thread.

Segments are whole pages of a device (2 MiB), as many of one size as the capacity has. A small tier has at least eight, so that
several sizes of chunks have a place, while it is large enough for that.
"""

from dataclasses import dataclass

import kvpool_native
from kvpool.config.config import Config
from kvpool.config.hbm_options import HbmConfig

NAME = "hbm"
# An eventfd, the exported memory, and what a CUDA context keeps open: some tens of files under /dev. A guess.
DESCRIPTORS = 64
DEVICE_PAGE_BYTES = 2 << 20
SEGMENTS_MIN = 8
# As for the arena: an entry for each of so many bytes.
CHUNK_BYTES_TYPICAL_MIN = 32 << 10
CHUNKS_MIN = 64
# Pinned memory that bytes pass through on their way to the device, and as much for the way back. A guess: what 32 GB/s move
# in a millisecond.
RING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class HbmPlan:
    """A configured device tier. `geometry`: of its memory."""

    config: HbmConfig
    geometry: kvpool_native.DirectoryGeometry

    @property
    def size(self) -> int:
        """Bytes of device memory."""
        return self.geometry.segments * self.geometry.segment_bytes


def plan_hbm(config: Config) -> HbmPlan:
    """The sizes of the tier. REQUIRES: the configuration has it."""
    assert config.hbm.is_used
    capacity = config.hbm.capacity
    wanted = min(config.dram.segment, capacity // SEGMENTS_MIN)
    segment_bytes = max(1, wanted // DEVICE_PAGE_BYTES) * DEVICE_PAGE_BYTES
    max_chunks = max(capacity // CHUNK_BYTES_TYPICAL_MIN, CHUNKS_MIN)
    return HbmPlan(config.hbm, kvpool_native.DirectoryGeometry.plan_device(capacity, segment_bytes, max_chunks))
