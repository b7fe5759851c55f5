"""Readers of copies in a device hold nothing there: what they have seen is either still so, with the bytes of the key, or is
seen to be no more.

What the directories have is the matter of the model in `native/tests/tiers/test_copies_model.cpp`. Here are bytes, of chunks of
several sizes that take one another's places.
"""

import random

from tests.rigs.flushing import flush_whole
from tests.rigs.tiers.device_world import CHUNK_BYTES, DeviceWorld, Seen, key_of

PROMPTS, LONGEST = 2, 6
ROUNDS = 40


def test_who_has_seen_a_copy_reads_the_bytes_of_its_key_or_finds_another_generation(seed: int) -> None:
    chance = random.Random(seed)
    world = DeviceWorld(memory_bytes=10 << 20, device_segments=3, file_chunks=1)
    seen: list[Seen] = []
    read = gone = 0
    for _ in range(ROUNDS):
        namespace, prompt = chance.randrange(len(CHUNK_BYTES)), chance.randrange(PROMPTS)
        keys = [key_of(namespace, prompt, at) for at in range(chance.randrange(1, LONGEST + 1))]
        world.save(namespace, keys)
        copying = world.begin_copy(namespace, keys)
        if chance.random() < 0.2:  # what memory has is another's when the copy is finished
            world.memory.discard(keys[0])
            world.save(namespace, keys)
        if copying is not None:
            world.end_copy(copying, succeeds=chance.random() < 0.85)
        hold, found = world.lease(namespace, keys)
        seen += found
        if hold:
            world.memory.release(hold, world.tick())
        if chance.random() < 0.1:
            flush_whole(chance.choice([world.memory, world.device]), world.tick())
        for each in seen:
            _, generation = world.device.place_of(each.key)
            assert world.read(each) == (generation == each.generation)
        there = [each for each in seen if world.read(each)]
        gone, read, seen = gone + len(seen) - len(there), read + len(there), seen[-64:]
        assert world.verify() == []
    assert read > 0
    assert gone > 0
