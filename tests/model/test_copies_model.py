"""Copies in a device beside memory and files: random operations against plain dicts, and readers that hold nothing there.

The model records what memory has, by key and generation, and which of it has a copy. A copy is there while its very original
is, unless it was evicted, flushed or dropped itself; an operation on copies changes nothing in memory. A reader that was
answered where a copy is may read it at any later time: while the slot has the generation, the bytes are those of the key. All
directories recount themselves after each step.
"""

import os
import random

import pytest

from kvpool.types import SaveState
from tests.rigs.flushing import flush_whole
from tests.rigs.tiers.device_world import CHUNK_BYTES, Copying, DeviceWorld, Seen, key_of

PROMPTS, LONGEST = 2, 6
STEPS = 1000
MEMORY_BYTES = 10 << 20
DEVICE_SEGMENTS, FILE_CHUNKS = 3, 12
SEEN_MAX = 64

Stored = dict[bytes, int]


class Play:
    """One run. `may_lose`: whether the step at hand may take copies out whose originals stay."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        policy = self.chance.choice(["lru", "class-queues"])
        self.world = DeviceWorld(
            memory_bytes=MEMORY_BYTES, device_segments=DEVICE_SEGMENTS, file_chunks=FILE_CHUNKS, policy=policy
        )
        self.copying: list[tuple[Copying, list[bytes]]] = []  # with the whole chain
        self.bad: dict[int, set[bytes]] = {}  # by reservation: what went with a copy that was found bad
        self.holds: list[int] = []
        self.pins: list[int] = []
        self.seen: list[Seen] = []
        self.copied: set[bytes] = set()
        self.may_lose = self.is_device_alone = False
        self.read_chunks = self.copied_chunks = 0

    def chain(self) -> tuple[int, list[bytes]]:
        """A namespace and a chain of it; prompts have their first half in common with their branches."""
        namespace, prompt, branch = (self.chance.randrange(count) for count in (len(CHUNK_BYTES), PROMPTS, 2))
        length = self.chance.randrange(1, LONGEST + 1)
        return namespace, [key_of(namespace, prompt, branch * (at >= LONGEST // 2), at) for at in range(length)]

    def everything(self) -> list[bytes]:
        """Every key there can be."""
        return [
            key_of(namespace, prompt, branch * (at >= LONGEST // 2), at)
            for namespace in range(len(CHUNK_BYTES))
            for prompt in range(PROMPTS)
            for branch in range(2)
            for at in range(LONGEST)
        ]

    def step(self) -> None:
        """A random operation, and the comparison."""
        memory, copies = self.stored()
        self.copied.clear()
        self.may_lose = self.is_device_alone = False
        often = [self.save, self.copy, self.finish_copy, self.lease, self.release]
        seldom = [self.retain, self.remove_in_memory, self.remove_in_device, self.pin, self.flush, self.demote]
        self.chance.choice(4 * often + seldom)()
        self.compare(memory, copies)
        assert self.world.verify() == []

    def stored(self) -> tuple[Stored, Stored]:
        """Generations by key, in memory and of copies."""
        found: tuple[Stored, Stored] = ({}, {})
        for key in self.everything():
            for where, directory in zip(found, (self.world.memory, self.world.device), strict=True):
                _, generation = directory.place_of(key)
                if generation:
                    where[key] = generation
        return found

    def compare(self, memory_before: Stored, copies_before: Stored) -> None:
        """What is stored now against what was."""
        memory, copies = self.stored()
        assert not self.is_device_alone or memory == memory_before, "an operation on copies changes nothing in memory"
        kept = {key for key in copies_before if memory.get(key) == memory_before[key]}
        assert copies.keys() <= kept | self.copied, "a copy of nothing"
        assert self.copied <= copies.keys()
        assert self.may_lose or kept <= copies.keys(), "a copy left without its original"
        assert all(copies[key] == copies_before[key] for key in copies.keys() & kept)
        for key in memory:
            assert self.world.set.tiers_of(key) & 3 == (3 if key in copies else 2)
            assert key not in copies or self.world.device.retention(key) == self.world.memory.retention(key)
        for seen in self.seen:
            is_there = self.world.read(seen)
            assert is_there == (copies.get(seen.key) == seen.generation)
            self.read_chunks += is_there

    def save(self) -> None:
        self.world.save(*self.chain())

    def demote(self) -> None:
        self.world.demote(*self.chain())

    def copy(self) -> None:
        self.may_lose = self.is_device_alone = True
        namespace, keys = self.chain()
        copying = self.world.begin_copy(namespace, keys)
        if copying is not None:
            self.copying.append((copying, keys))
            self.bad[copying.reservation] = set()

    def finish_copy(self) -> None:
        """Exactly what memory has had all the time is published, up to the first chunk that it has not."""
        self.is_device_alone = True
        if not self.copying:
            return
        copying, _ = self.copying.pop(self.chance.randrange(len(self.copying)))
        bad = self.bad.pop(copying.reservation)
        states = self.world.end_copy(copying, succeeds=self.chance.random() < 0.85)
        is_whole = True
        for key, generation, state in zip(copying.keys, copying.generations, states, strict=False):
            is_whole = is_whole and self.world.memory.place_of(key)[1] == generation and key not in bad
            assert (state == SaveState.STORED) == is_whole
            if is_whole:
                self.copied.add(key)
        self.copied_chunks += len(self.copied)

    def lease(self) -> None:
        hold, seen = self.world.lease(*self.chain())
        if hold:
            self.holds.append(hold)
        self.seen = (self.seen + seen)[-SEEN_MAX:]

    def release(self) -> None:
        if self.holds:
            hold = self.holds.pop(self.chance.randrange(len(self.holds)))
            if self.world.memory.release_part(hold, self.chance.randrange(1, LONGEST), self.world.tick()):
                self.world.memory.release(hold, self.world.tick())

    def retain(self) -> None:
        namespace, keys = self.chain()
        priorities = bytes(self.chance.choice((0, 20, 35, 60, 80)) for _ in keys)
        durations = b"".join(self.chance.choice((0, 100)).to_bytes(4, "little") for _ in keys)
        self.world.now_ns += self.chance.choice((0, 10**8))
        self.world.memory.retain(namespace, b"".join(keys), priorities, durations, self.world.tick())

    def remove_in_memory(self) -> None:
        key = self.chain()[1][-1]
        if self.chance.random() < 0.5:
            self.world.memory.drop(key, self.world.memory.place_of(key)[1])
        else:
            self.world.memory.discard(key)

    def remove_in_device(self) -> None:
        self.may_lose = self.is_device_alone = True
        key = self.chain()[1][-1]
        if self.world.device.drop(key, self.world.device.place_of(key)[1]):
            for copying, keys in self.copying:
                self.bad[copying.reservation].update(keys[keys.index(key) :] if key in keys else ())

    def pin(self) -> None:
        self.is_device_alone = True
        namespace, keys = self.chain()
        if self.pins and self.chance.random() < 0.5:
            assert self.world.device.unpin(self.pins.pop())
        elif pin := self.world.device.pin_key(namespace, keys[-1]):
            self.pins.append(pin)

    def flush(self) -> None:
        chosen = self.chance.choice(list(self.world.directories()))
        self.may_lose = self.is_device_alone = chosen is self.world.device
        flush_whole(chosen, self.world.now_ns - self.chance.choice((0, 10**8)))

    def finish(self) -> None:
        """Nothing is held in the end, and a flush of memory leaves nothing in the device."""
        while self.copying:
            self.finish_copy()
        for hold in self.holds:
            self.world.memory.release(hold, self.world.tick())
        for pin in self.pins:
            assert self.world.device.unpin(pin)
        flush_whole(self.world.memory, self.world.tick())
        counted = self.world.device.stats()
        assert (counted["chunks"], counted["zombies"], counted["used_bytes"], counted["writing"]) == (0, 0, 0, 0)
        assert self.world.verify() == []


@pytest.mark.parametrize("number", range(3))
def test_copies_are_what_memory_has_and_readers_see_their_bytes_or_none(number: int) -> None:
    seed = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32))) + number
    print(f"KVPOOL_SEED={seed - number}")
    play = Play(seed)
    for _ in range(STEPS):
        play.step()
    play.finish()
    assert play.copied_chunks > 0
    assert play.read_chunks > 0
