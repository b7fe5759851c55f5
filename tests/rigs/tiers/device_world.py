"""A directory of memory, one of files below it, and one of copies in a device, with bytes in memory and on the device.

Played by hand: a copy takes the bytes that memory has when it is finished, as a mover would that is late. Namespaces have
chunks of sizes of their own, of which a few fill the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.states import Level, SaveState

DEVICE_SEGMENT = 2 << 20
EXTENTS = 2
# The last one fits no segment, but a run of two.
CHUNK_BYTES = (256 << 10, 640 << 10, 2304 << 10)
WORD_BYTES = 8


def key_of(*named: int) -> bytes:
    """A key for these numbers."""
    key: bytes = kvpool_native.blake3(np.array(named, "<i8").tobytes())
    return key


def word_of(key: bytes) -> int:
    """The word that a key's chunk is filled with."""
    return int.from_bytes(key[:WORD_BYTES], "little")


def words_in(column: bytes) -> list[int]:
    """A column of u64."""
    words: list[int] = np.frombuffer(column, "<u8").tolist()
    return words


@dataclass(frozen=True)
class Copying:
    """A copy under way: chunks that have slots in the device, where memory has them, and with which generations."""

    reservation: int
    namespace: int
    keys: list[bytes]
    targets: list[int]
    sources: list[int]
    generations: list[int]


@dataclass(frozen=True)
class Seen:
    """What a reader was answered about the copy of a chunk."""

    key: bytes
    namespace: int
    offset: int
    slot: int
    generation: int


class DeviceWorld:
    """See the module. A namespace's number is that of its size of chunks, in `CHUNK_BYTES`."""

    def __init__(self, *, memory_bytes: int, device_segments: int, file_chunks: int, policy: str = "lru") -> None:
        geometry = kvpool_native.DirectoryGeometry
        on_device = geometry.plan_device(device_segments * DEVICE_SEGMENT, DEVICE_SEGMENT, 500)
        planned = geometry.plan(memory_bytes, 1 << 20, 500, 500, on_device)
        index = kvpool_native.Mapping.create("index", planned.index_bytes)
        self.memory = kvpool_native.Directory(None, index, planned, bytes(range(16)), policy)
        self.files = kvpool_native.Directory.of_files(geometry.plan_files(max(CHUNK_BYTES), file_chunks, 500))
        self.set = kvpool_native.TierSet((self.memory, self.files))
        self.device = kvpool_native.Directory.of_copies(self.memory, on_device, policy)
        self.view = kvpool_native.IndexView(index)
        self._arena = np.zeros(planned.arena_bytes // WORD_BYTES, "<u8")
        self._on_device = np.zeros(on_device.arena_bytes // WORD_BYTES, "<u8")
        self.now_ns = 10**9
        for directory in self.directories():
            directory.cap_retained(1.0)
            for number, size in enumerate(CHUNK_BYTES):
                assert directory.add_namespace() == directory.add_class(size, EXTENTS) == number
        for directory, sizes in ((self.memory, planned), (self.device, on_device)):
            for segment in range(sizes.segments):
                directory.mark_segment_ready(segment)
        for segment in range(file_chunks):
            self.files.mark_segment_ready(segment)

    def directories(self) -> Iterator[kvpool_native.Directory]:
        """Those of all tiers, the fastest first."""
        return iter((self.device, self.memory, self.files))

    def tick(self) -> int:
        """The time, a little later."""
        self.now_ns += 10**6
        return self.now_ns

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return [f"{Level(each.level).name}: {line}" for each in self.directories() for line in each.verify()]

    def save(self, namespace: int, keys: Sequence[bytes]) -> None:
        """Save a chain, as far as there is room."""
        made = self.memory.reserve(namespace, namespace, b"", b"".join(keys), self.tick())
        offsets, reserved = words_in(made.offsets), SaveState.RESERVED
        for number, state in enumerate(made.states):
            if state == reserved:
                self._bytes(self._arena, offsets[number], namespace)[:] = word_of(keys[number])
        self._publish(self.memory, made, made.states.count(reserved))

    def begin_copy(self, namespace: int, keys: Sequence[bytes]) -> Copying | None:
        """Slots in the device for what memory has of a chain; None where nothing is to be copied."""
        made = self.device.reserve(namespace, namespace, b"", b"".join(keys), self.tick())
        numbers = [number for number, state in enumerate(made.states) if state == SaveState.RESERVED]
        if not numbers:
            if made.id:
                self.device.end_reservation(made.id, self.tick())
            return None
        targets = words_in(made.offsets)
        places = [self.memory.place_of(keys[number]) for number in numbers]
        chosen = [keys[number] for number in numbers]
        at = [targets[number] for number in numbers]
        return Copying(made.id, namespace, chosen, at, *(list(column) for column in zip(*places, strict=True)))

    def end_copy(self, copying: Copying, *, succeeds: bool) -> bytes:
        """Move the bytes that are there now and publish them, or give up. The states."""
        states = b""
        if succeeds:
            for target, source in zip(copying.targets, copying.sources, strict=True):
                taken = self._bytes(self._arena, source, copying.namespace)
                self._bytes(self._on_device, target, copying.namespace)[:] = taken
            checksums = bytes(4 * EXTENTS * len(copying.keys))
            sources = np.array(copying.generations, "<u8").tobytes()
            states = self.device.commit(copying.reservation, 0, checksums, self.tick(), b"", sources, Level.DRAM)
        assert self.device.end_reservation(copying.reservation, self.tick())
        return states

    def lease(self, namespace: int, keys: Sequence[bytes]) -> tuple[int, list[Seen]]:
        """A hold on what memory has of a chain (0: nothing), and where its copies are."""
        held = self.memory.acquire(namespace, b"".join(keys), self.tick())
        if not held.id:
            return 0, []
        found, levels = self.memory.copies([held.id]), self.memory.columns([held.id]).levels
        columns = zip(words_in(found.offsets), words_in(found.slots), words_in(found.generations), strict=True)
        seen = [Seen(key, namespace, *row) for key, row in zip(keys, columns, strict=False) if row[2]]
        assert levels == bytes([Level.HBM] * len(seen) + [Level.DRAM] * (held.chunks - len(seen))), "whole prefixes"
        assert found.levels == bytes([Level.HBM] * len(seen) + [255] * (held.chunks - len(seen)))
        assert self.view.lookup(b"".join(keys), held.chunks) == levels
        return held.id, seen

    def read(self, seen: Seen) -> bool:
        """Copy from the device as a client does: whether the chunk was there, which then had its own bytes."""
        copied = self._bytes(self._on_device, seen.offset, seen.namespace)
        is_right = bool((copied == word_of(seen.key)).all())
        is_there: bool = self.view.generation_at(seen.slot) == seen.generation
        assert is_right or not is_there, "another chunk's bytes under a generation that stands"
        return is_there

    def _publish(self, directory: kvpool_native.Directory, made: kvpool_native.Reserved, count: int) -> None:
        if count:
            states = directory.commit(made.id, 0, bytes(4 * EXTENTS * count), self.tick())
            assert states == bytes([SaveState.STORED] * count)
        if made.id:
            directory.end_reservation(made.id, self.tick())

    def _bytes(self, memory: npt.NDArray[np.uint64], offset: int, namespace: int) -> npt.NDArray[np.uint64]:
        first = offset // WORD_BYTES
        return memory[first : first + CHUNK_BYTES[namespace] // WORD_BYTES]
