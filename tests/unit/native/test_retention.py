"""Retention through the native module: columns in, states out, and what is refused."""

import numpy as np
import pytest

import kvpool_native
from kvpool.ids import SizeClassId
from kvpool.index.namespaces import Namespaces
from kvpool.layout import Layout
from kvpool.packed_rows import CATALOGUE_ROW
from kvpool.states import DEFAULT_PRIORITY
from kvpool.tiers.ssd.catalogue.rows import Row, pack_restore_rows

CHUNK_BYTES = 8192
SECOND_NS = 10**9


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def durations(*durations_ms: int) -> bytes:
    return np.array(durations_ms, "<u4").tobytes()


class Store:
    """A directory of ten chunks."""

    def __init__(self, policy: str) -> None:
        geometry = kvpool_native.DirectoryGeometry.plan(10 * CHUNK_BYTES, 1 << 20, 100)
        arena = kvpool_native.Mapping.create("arena", geometry.arena_bytes, False)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes, False)
        self.directory = kvpool_native.Directory(arena, index, geometry, bytes(16), policy)
        for segment in range(geometry.segments):
            self.directory.mark_segment_ready(segment)
        self.namespace = self.directory.add_namespace()
        self.size_class = self.directory.add_class(CHUNK_BYTES, 1)

    def save(self, *numbers: int, now_ns: int = SECOND_NS) -> None:
        made = self.directory.reserve(self.namespace, self.size_class, b"", keys(*numbers), now_ns)
        self.directory.commit(made.id, 0, bytes(4 * made.states.count(1)), now_ns)
        self.directory.end_reservation(made.id, now_ns)


@pytest.fixture(params=["lru", "class-queues"])
def store(request: pytest.FixtureRequest) -> Store:
    return Store(request.param)


def test_columns_of_wrong_length_or_range_are_refused(store: Store) -> None:
    retain = store.directory.retain
    with pytest.raises(ValueError, match="1 byte and durations 4"):
        retain(store.namespace, keys(1, 2), bytes(1), durations(0, 0), 1)
    with pytest.raises(ValueError, match="1 byte and durations 4"):
        retain(store.namespace, keys(1, 2), bytes(2), durations(0), 1)
    with pytest.raises(ValueError, match="0 to 100"):
        retain(store.namespace, key(1), bytes([101]), durations(0), 1)
    with pytest.raises(IndexError):
        retain(store.namespace + 1, key(1), bytes([1]), durations(0), 1)
    with pytest.raises(ValueError, match="0 to 1"):
        store.directory.cap_retained(1.5)
    with pytest.raises(KeyError):
        store.directory.retentions(99)
    with pytest.raises(ValueError, match="lru or class-queues"):
        Store("fifo")


def test_rows_of_the_catalogue_are_restored_with_their_retention() -> None:
    geometry = kvpool_native.DirectoryGeometry.plan_files(64 * 4096, 1, 100)
    files = kvpool_native.Directory.of_files(geometry)
    files.mark_segment_ready(0)
    namespaces = Namespaces(files)
    namespace = namespaces.open("model", Layout(1, 1, 16, chunk_tokens=CHUNK_BYTES // 64))
    in_files = SizeClassId(files.add_class(CHUNK_BYTES, 1))
    slot_bytes = files.stats()["classes"][0]["slot_bytes"]
    encoded = [
        Row(key(1), b"", 0, 5, 9, CHUNK_BYTES, 1, 3, priority=70, duration_s=20).encode(),
        Row(key(2), key(1), slot_bytes, 6, 8, CHUNK_BYTES, 1, 3).encode(),
        Row(key(3), key(2), 2 * slot_bytes, 7, 7, CHUNK_BYTES, 1, 3, priority=1, duration_s=2**32 - 1).encode(),
    ]
    rows = np.frombuffer(b"".join(encoded), CATALOGUE_ROW)
    packed = pack_restore_rows(rows, {3: namespace}, lambda _: in_files)
    assert list(files.restore(packed.tobytes(), SECOND_NS)) == [1, 1, 1]
    files.finish_restore()
    assert files.retention(key(1)) == (70, 20_000)
    assert files.retention(key(2)) == (DEFAULT_PRIORITY, 0)
    assert files.retention(key(3)) == (1, 2**32 - 1)
    files.expire_retention(20 * SECOND_NS)
    assert files.retention(key(1)) == (70, 20_000), "its time began anew when it was restored"
    files.expire_retention(22 * SECOND_NS)
    assert files.retention(key(1)) == (DEFAULT_PRIORITY, 0)
    assert files.verify() == []
