"""`bench footprint --ssd-chunks`: memory for each chunk on disk, in a full tier of 1 MiB chunks.

A child process makes the directories that a daemon makes for such a tier, has the chunks restored as a restart does, and reads
how much its resident memory has grown: records, slots and keys of the tier, and its entries in the index that clients read. No
bytes of chunks are needed, nor a disk. All other data of a chunk on disk is in the catalogue, on disk.
"""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.ids import EPOCH_BYTES
from kvpool.key_column import KEY_BYTES, packed_bytes
from kvpool.packed_rows import RESTORE_ROW
from kvpool.states import DEFAULT_PRIORITY

DRAM_BYTES = 1 << 30
SEGMENT_BYTES = 64 << 20
FILE_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20
EXTENTS = 32
CHAIN = 64
CHUNKS_MAX = 32 << 20
BATCH = 2048
BYTES_BAR = 256
_COUNT = re.compile(r"([0-9]{1,9})([KM]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True, slots=True)
class Tier:
    """The restored tier."""

    chunks: int
    size_class: int
    slot_bytes: int


def bench_ssd_chunks(chunks: int, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """One row: a tier of so many chunks."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        row = executor.submit(measure, chunks).result()
    advance(1)
    return [row]


def parse_chunks(text: str) -> int:
    """A count such as 4M. Raises InvalidArgument."""
    found = _COUNT.fullmatch(text)
    chunks = int(found.group(1)) * _UNITS[found.group(2)] if found else 0
    if not 1 <= chunks <= CHUNKS_MAX:
        raise InvalidArgument(f"--ssd-chunks is {text}, expected a count from 1 to {CHUNKS_MAX >> 20}M, such as 4M")
    return chunks


def measure(chunks: int) -> dict[str, object]:
    """The row, measured in this process, which is best a fresh one."""
    slot_bytes = CHUNK_BYTES + kvpool_native.SSD_HEADER_BYTES
    plan = kvpool_native.DirectoryGeometry.plan
    geometry = plan(DRAM_BYTES, SEGMENT_BYTES, DRAM_BYTES // CHUNK_BYTES, chunks)
    index = kvpool_native.Mapping.create("kvpool-bench-index", geometry.index_bytes)
    fast = kvpool_native.Directory(None, index, geometry, os.urandom(EPOCH_BYTES))
    segments = -(-chunks // (FILE_BYTES // slot_bytes))
    below = kvpool_native.DirectoryGeometry.plan_files(FILE_BYTES, segments, chunks)
    files = kvpool_native.Directory.of_files(below)
    _tiers = kvpool_native.TierSet((fast, files))  # which lives as long as this measures
    size_class = files.add_class(slot_bytes, EXTENTS)
    for directory in (fast, files):
        directory.add_namespace()
    for segment in range(segments):
        files.mark_segment_ready(segment)
    random = np.random.default_rng(1)  # which loads code of its own
    before, before_cpu_s, began = _resident_bytes(), time.process_time(), time.perf_counter()
    _restore(files, Tier(chunks, size_class, slot_bytes), random)
    grown, took_s = _resident_bytes() - before, time.perf_counter() - began
    found = files.stats()["chunks"]
    assert found == chunks
    return {
        "name": f"{chunks} chunks on disk",
        "chunks": chunks,
        "capacity_bytes": below.capacity,
        "rss_mib": round(grown / (1 << 20), 1),
        "bytes_per_chunk": round(grown / chunks, 1),
        "bytes_bar": BYTES_BAR,
        "restore_s": round(took_s, 2),
        "cpu_seconds": round(time.process_time() - before_cpu_s, 2),
    }


def _restore(files: kvpool_native.Directory, tier: Tier, random: np.random.Generator) -> None:
    """Restore chains of CHAIN chunks under random keys, in slots one after another."""
    slots = FILE_BYTES // tier.slot_bytes
    for first in range(0, tier.chunks, BATCH):
        numbers = np.arange(first, min(tier.chunks, first + BATCH), dtype=np.uint64)
        keys = np.frombuffer(random.bytes(packed_bytes(len(numbers))), RESTORE_ROW["key"])
        rows = np.zeros(len(numbers), RESTORE_ROW)
        rows["key"] = keys
        rows["parent"][1:] = keys[:-1]
        rows["parent"][numbers % CHAIN == 0] = bytes(KEY_BYTES)
        rows["offset"] = numbers // slots * FILE_BYTES + numbers % slots * tier.slot_bytes
        rows["generation"] = numbers + 1
        rows["size_class"] = tier.size_class
        rows["priority"] = DEFAULT_PRIORITY
        files.restore(rows.tobytes())
    files.finish_restore()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
