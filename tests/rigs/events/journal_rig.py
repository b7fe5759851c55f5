"""Two tiers driven by hand, a device with copies where wanted, and the journal over them: for tests that compare events with
known operations."""

import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import kvpool_native
from kvpool.config.config import load_config
from kvpool.events import Event, EventKind
from kvpool.index.namespaces import Namespaces
from kvpool.journal.journal import Journal
from kvpool.journal.snapshot_page import SNAPSHOT_END
from kvpool.key_column import KeyColumn
from kvpool.keys import pack_scope
from kvpool.layout import Layout
from kvpool.states import Level, SaveState
from kvpool.tiers.slots import Slots, SlotSizes
from tests.rigs.clock import HandClock
from tests.rigs.events.readers import Replica
from tests.rigs.flushing import flush_whole

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=8)
SLOT = 4096
LAYERS = LAYOUT.layers
HBM, DRAM, SSD = 1 << Level.HBM, 1 << Level.DRAM, 1 << Level.SSD
DEVICE_BYTES, DEVICE_CHUNKS = 2 << 20, 7
SCOPES = (("", b""), ("", b"salt"), ("adapter", b"another"))


class RigHeaders:
    """Headers of slots on disk: the words that each key was stored with, by slot, as `SsdHeaders` would read them."""

    def __init__(self) -> None:
        self.words: dict[bytes, bytes] = {}
        self.questions = 0

    def request_headers(
        self, places: Sequence[tuple[bytes, bytes, int, int]], *, is_urgent: bool
    ) -> "Future[list[bytes]]":
        """Answers at once."""
        answer: Future[list[bytes]] = Future()
        self.questions += 1
        assert not is_urgent, "only the publisher's own source asks so"
        assert all(len(key) == len(namespace) == 32 and generation > 0 for key, namespace, _, generation in places)
        answer.set_result([self.words.get(key, b"") for key, _, _, _ in places])
        return answer

    def stats(self) -> dict[str, int]:
        """Nothing is counted here."""
        return {}


class Rig:
    """Two tiers, played by hand, and their journal."""

    def __init__(self, *, chunks: int = 24, has_device: bool = False, **options: str) -> None:
        self.headers = RigHeaders()
        self._options = options
        self._has_device = has_device
        self._begin(chunks)

    def _begin(self, chunks: int) -> None:
        planned = kvpool_native.DirectoryGeometry.plan_device(DEVICE_BYTES, DEVICE_BYTES, DEVICE_CHUNKS)
        device = planned if self._has_device else None
        geometry = kvpool_native.DirectoryGeometry.plan(chunks * LAYOUT.chunk_bytes, 4 * SLOT, 400, 400, device)
        arena = kvpool_native.Mapping.create("arena", geometry.arena_bytes)
        index = kvpool_native.Mapping.create("index", geometry.index_bytes)
        self.epoch = os.urandom(16)
        self.memory = kvpool_native.Directory(arena, index, geometry, self.epoch)
        slots = Slots("ssd", Level.SSD, SlotSizes(8 * 2 * SLOT, 8, 400, header_bytes=lambda _: SLOT))
        self.files = slots.directory
        self.tiers = kvpool_native.TierSet((self.memory, self.files))
        for directory in (self.memory, self.files):
            directory.cap_retained(0.5)
        for segment in range(geometry.segments):
            self.memory.mark_segment_ready(segment)
        self.namespaces = Namespaces(self.memory)
        self.namespaces.add_lower(slots, lambda _: None)
        self.namespace = self.namespaces.open("model", LAYOUT)
        below = slots.size_class_of(LAYOUT)
        assert below is not None
        self.below = below
        self.device = self._copies_in(device) if device is not None else None
        self.clock = HandClock(1000 * 10**9)
        config = load_config(None, [f"events.{name}={value}" for name, value in self._options.items()]).events
        tiers = {Level.DRAM: (self.memory, 400), Level.SSD: (self.files, 400)}
        if self.device is not None:
            tiers[Level.HBM] = (self.device, DEVICE_CHUNKS)
        self.journal = Journal(
            self.epoch, tiers, self.namespaces, clock=self.clock, config=config, headers={Level.SSD: self.headers}
        )

    def _copies_in(self, device: kvpool_native.DirectoryGeometry) -> kvpool_native.Directory:
        copies = kvpool_native.Directory.of_copies(self.memory, device)
        assert copies.add_namespace() == self.namespace.id
        assert copies.add_class(LAYOUT.chunk_bytes, LAYERS) == self.namespace.size_class
        copies.mark_segment_ready(0)
        return copies

    def restart(self, *, chunks: int = 24) -> None:
        """Another life of the daemon, which finds what lay on disk; parents first, as the catalogue gives them."""
        rows, cursor, is_first = [], 0, True
        while cursor or is_first:
            cursor, packed = self.files.list_chunks(cursor, 50)
            for at in range(0, len(packed), kvpool_native.CHANGE_ROW.bytes):
                stored, parent = packed[at : at + 32], packed[at + 32 : at + 64]
                rows.append((stored, parent, *self.files.place_of(stored), self.files.retention(stored)))
            is_first = False
        self._begin(chunks)
        by_key, done = {row[0]: row for row in rows}, []
        while by_key:
            ready = [row for row in by_key.values() if row[1] not in by_key]
            done += ready
            for row in ready:
                del by_key[row[0]]
        restored = self.files.restore(
            b"".join(
                stored + parent + struct.pack("<QQIIII", offset, number, self.namespace.id, self.below, kept[0], 0)
                for stored, parent, offset, number, kept in done
                if kept is not None
            )
        )
        assert restored == b"\1" * len(rows)
        self.files.finish_restore()

    def tick(self) -> int:
        self.clock.advance(1)
        return self.clock.now_ns()

    def store(self, names: list[int]) -> bytes:
        column = b"".join(key(names[: at + 1]) for at in range(len(names)))
        made = self.memory.reserve(self.namespace.id, self.namespace.size_class, b"", column, self.tick())
        self.journal.note_refusals(KeyColumn(column), made.states, self.namespace.id)
        reserved = [at for at, state in enumerate(made.states) if state == SaveState.RESERVED]
        if reserved:
            words = [words_of(names[: at + 1]) for at in reserved]
            self.headers.words.update((column[32 * at : 32 * at + 32], words_of(names[: at + 1])) for at in reserved)
            self.memory.commit(made.id, 0, sums(len(reserved)), self.tick(), b"".join(words))
            self.memory.end_reservation(made.id, self.tick())
        return made.states

    def drop(self, directory: kvpool_native.Directory, chunk: bytes) -> None:
        """The effect of a verdict about the chunk as it is now."""
        directory.drop(chunk, directory.place_of(chunk)[1])

    def demote(self) -> None:
        pinned = self.memory.pin_unsaved(64, 1)
        if not pinned.id:
            return
        keys = self.memory.keys_of([pinned.id])
        reserved = self.files.reserve(self.namespace.id, self.below, pinned.parent, keys, self.tick())
        taken = reserved.states.count(SaveState.RESERVED)
        assert taken <= pinned.chunks
        if reserved.id:
            self.files.commit(reserved.id, 0, sums(taken), self.tick())
            self.files.end_reservation(reserved.id, self.tick())
        self.memory.unpin(pinned.id)

    def copy(self, names: list[int]) -> int:
        """Copy what memory has of a chain to the device: how many chunks came."""
        assert self.device is not None
        column = b"".join(key(names[: at + 1]) for at in range(len(names)))
        made = self.device.reserve(self.namespace.id, self.namespace.size_class, b"", column, self.tick())
        count = made.states.count(SaveState.RESERVED)
        if count:
            states = self.device.commit(made.id, 0, sums(count), self.tick())
            assert states == bytes([SaveState.STORED] * count)
        if made.id:
            self.device.end_reservation(made.id, self.tick())
        return count

    def use(self, names: list[int]) -> None:
        """A lease of a chain, which ends."""
        column = b"".join(key(names[: at + 1]) for at in range(len(names)))
        held = self.memory.acquire(self.namespace.id, column, self.tick())
        if held.id:
            self.memory.release(held.id, self.tick())

    def promote(self, names: list[int]) -> None:
        column = b"".join(key(names[: at + 1]) for at in range(len(names)))
        made = self.memory.promote(self.namespace.id, self.namespace.size_class, b"", column, self.tick())
        for at, state in enumerate(made.states):
            if state == SaveState.RESERVED:
                (generation,) = struct.unpack_from("<Q", made.generations, 8 * at)
                self.memory.landed(column[32 * at : 32 * at + 32], generation, words_of(names[: at + 1]))
        if made.id:
            self.memory.release(made.id, self.tick())

    def retain(self, names: list[int], chance: random.Random) -> None:
        column = b"".join(key(names[: at + 1]) for at in range(len(names)))
        priorities = bytes(chance.choice((0, 35, 80)) for _ in names)
        durations = b"".join(struct.pack("<I", chance.choice((0, 3000))) for _ in names)
        self.memory.retain(self.namespace.id, column, priorities, durations, self.tick())

    def priority(self, chunk: bytes) -> int:
        """The retention of a chunk in the fastest tier that has it."""
        kept = self.memory.retention(chunk) or self.files.retention(chunk)
        assert kept is not None
        return kept[0]

    def truth(self) -> dict[bytes, int]:
        """Tiers by key, asked of the directories chunk by chunk."""
        found: dict[bytes, int] = {}
        for bit, directory in ((HBM, self.device), (DRAM, self.memory), (SSD, self.files)):
            cursor, is_first = 0, True
            while directory is not None and (cursor or is_first):
                page = directory.records(cursor, 50)
                for row in page.records:
                    found[row.key] = found.get(row.key, 0) | bit
                if page.pin:
                    directory.unpin(page.pin)
                cursor, is_first = page.next, False
        return found

    def random_step(self, chance: random.Random) -> None:
        """One random operation of a daemon; waiting chunks are demoted before more are evicted."""
        self.journal.keep_up()
        names = [chance.randrange(3), *(chance.randrange(2) for _ in range(chance.randrange(5)))]
        dice = chance.randrange(15)
        if self.device is not None and chance.random() < 0.3:
            self._device_step(self.device, names, chance)
        elif dice < 5:
            self.store(names)
        elif dice < 7:
            self.demote()
        elif dice == 7:
            self.promote(names)
        elif dice == 8:
            self.drop(self.memory, key(names))
        elif dice == 9:
            self.drop(self.files, key(names))
        elif dice < 13:
            self.retain(names, chance)
        else:
            directory = chance.choice((self.memory, self.files))
            flush_whole(directory, self.clock.now_ns() - chance.randrange(40) * 10**9)

    def _device_step(self, device: kvpool_native.Directory, names: list[int], chance: random.Random) -> None:
        dice = chance.randrange(8)
        if dice < 4:
            self.copy(names)
        elif dice < 6:
            self.use(names)
        elif dice == 6:
            self.drop(device, key(names))
        else:
            flush_whole(device, self.clock.now_ns() - chance.randrange(40) * 10**9)

    def verify(self) -> list[str]:
        """Broken invariants of the directories and the journal."""
        directories = [directory for directory in (self.device, self.memory, self.files) if directory is not None]
        return [problem for directory in directories for problem in directory.verify()] + self.journal.verify()

    def demote_all(self) -> None:
        """Until the files have what memory has."""
        for _ in range(self.memory.count_unsaved()):
            self.demote()
        assert self.memory.count_unsaved() == 0

    def slices(self, replica: Replica) -> Iterator[None]:
        """Brings a replica up to now, slice by slice."""
        while (found := self.journal.since(self.epoch, replica.last)).events:
            assert not found.is_gap
            replica.apply(found.events)
            yield


def key(names: list[int]) -> bytes:
    return random.Random(repr(names)).randbytes(31) + b"\0"


def follow(rig: Rig, replica: Replica) -> None:
    """Brings a replica up to now."""
    for _ in rig.slices(replica):
        pass


def take_snapshot(rig: Rig, replica: Replica, between: Callable[[], None] = lambda: None) -> bool:
    """Resets a replica to a new snapshot. `between` runs after each page, before the events published meanwhile are read.

    False where the log was overtaken meanwhile: another snapshot is wanted.
    """
    page = rig.journal.snapshot(0)
    replica.begin_snapshot(page.as_of)
    while True:
        between()
        while replica.last < page.as_of:
            found = rig.journal.since(rig.epoch, replica.last)
            if found.is_gap:
                return False
            replica.apply(found.events_until(page.as_of).events)
        if page.words is not None:
            page = page.with_words(page.words.result(1.0), rig.journal.chunk_tokens)
        replica.merge(page.chunks)
        if page.cursor == SNAPSHOT_END:
            return True
        page = rig.journal.snapshot(page.cursor)


def words_of(names: list[int]) -> bytes:
    """Token ids and scope of a chunk; all chunks of a prompt have one scope."""
    return tokens_of(names[-1]) + pack_scope(*SCOPES[names[0] % len(SCOPES)])


def tokens_of(name: int) -> bytes:
    return struct.pack("<8i", *range(name, name + 8))


def sums(chunks: int) -> bytes:
    return bytes(4 * LAYERS * chunks)


def changes(rig: Rig) -> list[tuple[EventKind, int, int, int]]:
    """Kind, chunks, tiers before and after of each event but the first."""
    found: list[Event] = []
    while (news := rig.journal.since(b"", found[-1].id if found else 0)).events:
        found += news.events
    return [(event.kind, len(event.chunks), event.tiers_before, event.tiers) for event in found]
