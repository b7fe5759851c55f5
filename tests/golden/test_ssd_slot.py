"""The bytes of a slot on disk. `ssd_slot_header.bin` is the header of the chunk below, `ssd_slot_header_tokens.bin` that of the
same chunk with its token ids."""

from pathlib import Path

import numpy as np

import kvpool_native
from tests.rigs.daemon import wait_until

HERE = Path(__file__).parent
GOLDEN, GOLDEN_TOKENS = HERE / "ssd_slot_header.bin", HERE / "ssd_slot_header_tokens.bin"
TOKENS = np.arange(100_000, 100_016, dtype="<i4").tobytes()
EXTENTS, EXTENT_BYTES, PAGE = 3, 5000, 4096
KEY, PARENT, NAMESPACE, EPOCH = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96)), bytes(range(96, 112))
GENERATION = 0x1122334455667788
SLOT_PAGES = 1 + -(-EXTENTS * EXTENT_BYTES // PAGE)


def _written_slot(directory: Path, tokens: bytes = b"") -> bytes:
    """The slot that the native module writes for the chunk."""
    geometry = kvpool_native.DirectoryGeometry.plan(1 << 20, 1 << 17, 64)
    arena = kvpool_native.Mapping.create("golden-arena", geometry.arena_bytes)
    index = kvpool_native.Mapping.create("golden-index", geometry.index_bytes)
    memory = kvpool_native.Directory(arena, index, geometry, bytes(16))
    for segment in range(geometry.segments):
        memory.mark_segment_ready(segment)
    size_class = memory.add_class(EXTENTS * EXTENT_BYTES, EXTENTS)
    made = memory.reserve(memory.add_namespace(), size_class, b"", KEY, 1)
    place = int.from_bytes(made.offsets, "little")
    arena.view()[place : place + EXTENTS * EXTENT_BYTES] = np.arange(EXTENTS * EXTENT_BYTES, dtype=np.uint32) % 251
    memory.commit(made.id, 0, kvpool_native.extent_checksums(arena, place, EXTENT_BYTES, EXTENTS))
    files = kvpool_native.SsdFiles.open(str(directory / "tier"), 16 * PAGE, 1, True)
    queue = kvpool_native.SsdQueue(files, arena, index, 1, 4, wants_rings=False)
    slot = int.from_bytes(made.slots, "little")
    words = b"".join(number.to_bytes(8, "little") for number in (2 * PAGE, place, slot, GENERATION))
    row = KEY + PARENT + words
    assert queue.write(row, EPOCH, NAMESPACE, EXTENTS, EXTENT_BYTES, kvpool_native.IndexView(index), [tokens])
    outcomes: list[kvpool_native.ChunkOutcome] = []

    def has_outcomes() -> bool:
        outcomes.extend(queue.take_outcomes())
        return bool(outcomes)

    wait_until(has_outcomes, "the slot is written")
    assert [outcome.status for outcome in outcomes] == [0]
    assert queue.stop(10.0)
    segment_file = (directory / "tier" / "segment-000000.kvs").read_bytes()
    return segment_file[2 * PAGE : (2 + SLOT_PAGES) * PAGE]


def test_a_slot_has_the_bytes_of_its_format(tmp_path: Path) -> None:
    slot = _written_slot(tmp_path)
    assert slot[:PAGE] == GOLDEN.read_bytes()
    payload = np.frombuffer(slot[PAGE : PAGE + EXTENTS * EXTENT_BYTES], np.uint8)
    assert np.array_equal(payload, (np.arange(EXTENTS * EXTENT_BYTES) % 251).astype(np.uint8))


def test_the_golden_header_reads_as_the_document_says() -> None:
    page = GOLDEN.read_bytes()
    assert len(page) == PAGE == _number(page, 152)
    assert (page[:8], _number(page, 8)) == (b"KVPSLOT1", 1)
    assert page[16:32] == EPOCH
    assert (page[32:64], page[64:96], page[96:128]) == (KEY, PARENT, NAMESPACE)
    assert _number(page, 128, 8) == GENERATION
    assert (_number(page, 136, 8), _number(page, 144), _number(page, 156)) == (EXTENT_BYTES, EXTENTS, 8)
    assert page[160:168] == bytes(8)
    table = [(_number(page, 168 + 8 * extent), _number(page, 172 + 8 * extent)) for extent in range(EXTENTS)]
    payload = (np.arange(EXTENTS * EXTENT_BYTES) % 251).astype(np.uint8).tobytes()
    sums = [
        kvpool_native.crc32c(payload[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES]) for extent in range(EXTENTS)
    ]
    assert table == [(crc, EXTENT_BYTES) for crc in sums]
    without_crc = page[:12] + bytes(4) + page[16:]
    assert _number(page, 12) == kvpool_native.crc32c(without_crc)
    assert page[168 + 8 * EXTENTS :] == bytes(PAGE - 168 - 8 * EXTENTS)


def test_token_ids_follow_the_table(tmp_path: Path) -> None:
    page = GOLDEN_TOKENS.read_bytes()
    assert _written_slot(tmp_path, TOKENS)[:PAGE] == page
    assert _number(page, 148) == len(TOKENS) // 4
    end, plain = 168 + 8 * EXTENTS, GOLDEN.read_bytes()
    assert page[:12] + page[16:148] + page[152:end] == plain[:12] + plain[16:148] + plain[152:end]
    assert page[end : end + len(TOKENS)] == TOKENS
    assert page[end + len(TOKENS) :] == bytes(PAGE - end - len(TOKENS))
    decoded = kvpool_native.decode_ssd_header(page)
    assert decoded is not None
    assert decoded.tokens == TOKENS


def test_token_ids_that_do_not_fit_the_header_are_left_out(tmp_path: Path) -> None:
    most = (PAGE - 168 - 8 * EXTENTS) // 4
    assert _written_slot(tmp_path, bytes(4 * (most + 1)))[:PAGE] == GOLDEN.read_bytes()


def _number(page: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(page[at : at + size], "little")
