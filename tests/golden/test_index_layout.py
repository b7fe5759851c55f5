"""The shared index, and the words of slots in it, byte for byte, compared with a file that an earlier build wrote.

    00001640  02000000 01000000 02000000 00000000      an offset and sixteen bytes; what is zero is left out

Where a chunk's entry stands depends on a seed that each index draws, so what is written now is compared entry by entry.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvpool_native

GOLDEN = Path(__file__).parent / "shared_index_1.txt"
LINE_BYTES = 16
PAGE_BYTES = 4096
SEED = slice(48, 64)
REGIONS_AT = 192
SEGMENT_BYTES = 16 << 10
ENTRY_BYTES = 64
CHUNK_BYTES, EXTENTS = 8192, 2
KEYS = [kvpool_native.blake3(bytes([number])) for number in range(4)]
OFFSETS = [0, 8192, 16384]
# A segment of 16 KiB has two of these slots, and numbers for four.
SLOTS = [0, 1, 4]
CHANGED = """the layout of the shared index has changed: give INDEX_VERSION the next number, say so in docs/protocol.md and
CHANGELOG.md, and write what this test writes (`dump`) to a file of that number"""


def write_index() -> kvpool_native.Mapping:
    """The index of two chunks that are stored and a third one that is being written behind them."""
    geometry = kvpool_native.DirectoryGeometry.plan(128 << 10, 64 << 10, 64)
    arena = kvpool_native.Mapping.create("golden-arena", geometry.arena_bytes)
    index = kvpool_native.Mapping.create("golden-index", geometry.index_bytes)
    directory = kvpool_native.Directory(arena, index, geometry, bytes(range(16)))
    for segment in range(geometry.segments):
        directory.mark_segment_ready(segment)
    namespace, size_class = directory.add_namespace(), directory.add_class(CHUNK_BYTES, EXTENTS)
    reserved = directory.reserve(namespace, size_class, b"", b"".join(KEYS[:2]), 1)
    sums = np.arange(1, 1 + 2 * EXTENTS, dtype="<u4") * 0x01010101
    directory.commit(reserved.id, 0, sums.tobytes())
    further = directory.reserve(namespace, size_class, KEYS[1], KEYS[2], 2)
    assert np.frombuffer(reserved.offsets + further.offsets, "<u8").tolist() == OFFSETS
    return index


def recorded_index() -> kvpool_native.Mapping:
    """The index of the file."""
    geometry = kvpool_native.DirectoryGeometry.plan(128 << 10, 64 << 10, 64)
    index = kvpool_native.Mapping.create("recorded-index", geometry.index_bytes)
    view = index.view()
    for line in GOLDEN.read_text().splitlines():
        at, *words = line.split()
        view[int(at, 16) : int(at, 16) + LINE_BYTES] = np.frombuffer(bytes.fromhex("".join(words)), np.uint8)
    return index


def dump(data: bytes) -> str:
    """Memory as the file has it."""
    lines = [(at, data[at : at + LINE_BYTES]) for at in range(0, len(data), LINE_BYTES)]
    return "".join(f"{at:08x}  {line.hex(' ', 4)}\n" for at, line in lines if any(line))


def _placeless(index: kvpool_native.Mapping) -> tuple[str, list[bytes]]:
    """An index without its seed and its table, and the table's entries in the order of their records."""
    data = bytearray(index.view())
    data[SEED] = bytes(SEED.stop - SEED.start)
    table_end = PAGE_BYTES + int.from_bytes(data[16:24], "little") * ENTRY_BYTES
    table = [bytes(data[at : at + ENTRY_BYTES]) for at in range(PAGE_BYTES, table_end, ENTRY_BYTES)]
    data[PAGE_BYTES:table_end] = bytes(table_end - PAGE_BYTES)
    return dump(bytes(data)), sorted(entry for entry in table if any(entry))


def test_an_index_is_written_as_its_version_has_it() -> None:
    assert _placeless(write_index()) == _placeless(recorded_index()), CHANGED


@pytest.mark.parametrize("make", [write_index, recorded_index])
def test_an_index_of_its_version_is_read(make: Callable[[], kvpool_native.Mapping]) -> None:
    view = kvpool_native.IndexView(make())
    assert view.lookup(b"".join(KEYS)) == bytes([1, 1])
    assert [view.is_being_written(key) for key in KEYS] == [False, False, True, False]
    assert [view.generation_at(slot) for slot in SLOTS] == [1, 2, 0]
    assert [view.checksum_at(SLOTS[1], extent) for extent in range(EXTENTS)] == [0x03030303, 0x04040404]
    assert (view.epoch, view.count) == (bytes(range(16)), 3)


def test_words_of_slots_are_where_the_header_says() -> None:
    data = bytes(recorded_index().view())
    arena_bytes, slots, checksums, words_at, checksums_at = struct.unpack_from("<5Q", data, REGIONS_AT)
    assert (arena_bytes, slots, checksums) == (9 * SEGMENT_BYTES, 9 * 4, 9 * 16)
    assert checksums_at == words_at + 16 * slots
    words = [struct.unpack_from("<QII", data, words_at + 16 * slot) for slot in SLOTS]
    assert words == [(1, EXTENTS, 0), (2, EXTENTS, EXTENTS), (0, 0, 16)]


@pytest.mark.parametrize("at", [0, 8])
def test_an_index_of_another_kind_or_version_is_not_read(at: int) -> None:
    index = write_index()
    index.view()[at] += 1
    with pytest.raises((ValueError, RuntimeError)):
        kvpool_native.IndexView(index)
