"""Slot tables against a dict: what is found is what was published, and what was used last stays."""

import random

import numpy as np
import pytest

from kvpool_sparse.device.slot_table import NONE, Numbers, SlotTable

LAYERS, KV_HEADS = 3, 2


def numbers(*values: int) -> Numbers:
    return np.array(values, np.int64)


def publish(table: SlotTable, layer: int, *blocks: int, is_prefetched: bool = False) -> Numbers:
    """Publish these blocks of KV head 0."""
    slots = table.take_slots(len(blocks))
    heads = np.zeros(len(blocks), np.int64)
    table.publish(layer, numbers(*blocks), heads, slots, is_prefetched=is_prefetched)
    return slots


def found(table: SlotTable, layer: int, *blocks: int) -> Numbers:
    return table.find(layer, numbers(*blocks), np.zeros(len(blocks), np.int64))


def test_a_step_that_needs_more_than_there_is_uses_its_newest_slots_again() -> None:
    table = SlotTable(4, LAYERS, KV_HEADS)
    table.begin_step()
    publish(table, 0, 0, 1)
    publish(table, 0, 2, 3)
    publish(table, 0, 4, 5)
    assert (found(table, 0, 0, 1, 2, 3, 4, 5) != NONE).tolist() == [True, True, False, False, True, True]
    table.verify()


def test_what_cannot_be_is_asserted() -> None:
    table = SlotTable(2, LAYERS, KV_HEADS)
    slots = publish(table, 0, 1)
    with pytest.raises(AssertionError):
        table.publish(0, numbers(2), numbers(0), slots)
    with pytest.raises(AssertionError):
        table.publish(0, numbers(1), numbers(0), 1 - slots)
    with pytest.raises(AssertionError):
        table.take_slots(3)


def test_random_lives_are_those_of_a_dict() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    table = SlotTable(12, LAYERS, KV_HEADS)
    model: dict[tuple[int, int, int], int] = {}  # in the order of use
    for _ in range(500):
        layer = chance.randrange(LAYERS)
        pairs = chance.sample([(block, head) for block in range(20) for head in range(KV_HEADS)], chance.randint(1, 6))
        blocks, heads = (numbers(*column) for column in zip(*pairs, strict=True))
        slots = table.find(layer, blocks, heads)
        assert slots.tolist() == [model.get((layer, *pair), NONE) for pair in pairs]
        if chance.random() < 0.02:
            table.clear()
            model.clear()
            continue
        table.begin_step()
        table.touch(slots[slots != NONE])
        for pair in pairs:
            if (layer, *pair) in model:
                model[(layer, *pair)] = model.pop((layer, *pair))
        missing = slots == NONE
        if missing.any():
            taken = table.take_slots(int(missing.sum()))
            for _ in range(max(0, len(model) + len(taken) - table.slots)):
                del model[next(iter(model))]
            assert not set(taken.tolist()) & set(model.values())
            table.publish(layer, blocks[missing], heads[missing], taken)
            new = [pair for pair, is_missing in zip(pairs, missing, strict=True) if is_missing]
            model.update({(layer, *pair): int(slot) for pair, slot in zip(new, taken, strict=True)})
        table.verify()
        assert table.used == len(model)
