"""SSD plan: how a capacity is divided into segment files, a catalogue and other files.

Invariant: all of it together never takes more than the capacity. Pure functions; any thread.
"""

from dataclasses import dataclass
from pathlib import Path

from kvpool.config.config import Config, SsdConfig
from kvpool.errors import ConfigError
from kvpool.ids import PAGE_BYTES
from kvpool.tiers.ssd.catalogue.identity import FILE_BYTES_MAX as IDENTITY_BYTES_MAX
from kvpool.units import format_size, write_size

NAME = "ssd"
# A record takes about 150 bytes in LMDB; the map has room for four times what is needed, because full maps are slow.
CATALOGUE_BYTES_PER_CHUNK = 640
CATALOGUE_BYTES_MIN = 1 << 20
# Lock files, the marker of an opening, the floors of flushes (32 KiB), and the directories themselves.
OTHER_BYTES = 64 << 10
SEGMENTS_MIN = 8
CATALOGUE_NAME = "catalogue"
SEGMENT_PREFIX = "segment-"
SEGMENT_SUFFIX = ".kvs"
# Each file costs a descriptor. A tier larger than LARGE_BYTES has larger files instead of more files than this.
SEGMENTS_MAX_LARGE = 1 << 14
LARGE_BYTES = 4 << 40
# The number that the names of the files have room for.
SEGMENTS_MAX = 1_000_000
CHUNK_BYTES_TYPICAL_MIN = 256 << 10
CHUNK_BYTES_SMALL = 16 << 10
CHUNKS_SMALL_TIER = 1 << 16
QUEUE_JOBS = 1024
# Chunks that one turn of the control thread settles, at up to 20 µs each (measured).
OUTCOMES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class SsdPlan:
    """The sizes of a tier, derived from its configuration before anything is opened."""

    config: SsdConfig
    segment_bytes: int
    segments: int
    max_chunks: int
    catalogue_bytes: int

    @property
    def path(self) -> Path:
        """The tier's directory."""
        return Path(self.config.path)


def segment_name(number: int) -> str:
    """The file of a segment; native code makes the same name (`ssd_files.cpp`)."""
    return f"{SEGMENT_PREFIX}{number:06d}{SEGMENT_SUFFIX}"


def plan_ssd(config: SsdConfig) -> SsdPlan:
    """Divide a capacity into segment files and a catalogue."""
    capacity = config.capacity
    derived = max(capacity // CHUNK_BYTES_TYPICAL_MIN, min(capacity // CHUNK_BYTES_SMALL, CHUNKS_SMALL_TIER))
    chunks = config.max_chunks or derived
    catalogue_bytes = max(CATALOGUE_BYTES_MIN, -(-chunks * CATALOGUE_BYTES_PER_CHUNK // PAGE_BYTES) * PAGE_BYTES)
    # The catalogue, one that was set aside, and twice the identity: a new one is written beside the old one.
    data_bytes = capacity - 2 * catalogue_bytes - 2 * IDENTITY_BYTES_MAX - OTHER_BYTES
    wanted = min(config.segment, max(data_bytes, 0) // SEGMENTS_MIN)
    segment_bytes = wanted // PAGE_BYTES * PAGE_BYTES
    if capacity > LARGE_BYTES:
        least = -(-data_bytes // (SEGMENTS_MAX_LARGE * PAGE_BYTES)) * PAGE_BYTES
        segment_bytes = max(segment_bytes, least)
    if segment_bytes < 2 * PAGE_BYTES:
        raise ConfigError(
            [
                f"ssd.capacity is {write_size(capacity)}, expected more: "
                f"the catalogue of {chunks} chunks (ssd.max_chunks) takes twice {write_size(catalogue_bytes)}"
            ]
        )
    if data_bytes // segment_bytes > SEGMENTS_MAX:
        least = -(-data_bytes // (SEGMENTS_MAX * PAGE_BYTES)) * PAGE_BYTES
        expected = f"at least {write_size(least)} for ssd.capacity {write_size(capacity)}"
        raise ConfigError([f"ssd.segment is {write_size(config.segment)}, expected {expected}"])
    return SsdPlan(config, segment_bytes, data_bytes // segment_bytes, chunks, catalogue_bytes)


def warning_of(config: Config) -> str:
    """The warning about a tier that is smaller than DRAM; empty where it is not."""
    if not 0 < config.ssd.capacity < config.dram.capacity:
        return ""
    return (
        f"ssd.capacity is {format_size(config.ssd.capacity)}, less than dram.capacity {format_size(config.dram.capacity)}: "
        "it cannot even hold what DRAM has, and a restart loses the rest"
    )
