"""Token ids packed natively for routers: the bytes that msgpack itself makes of the same numbers."""

import random

import msgpack
import numpy as np
import pytest

import kvpool_native

EDGES = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, -1, -32, -33, -128, -129, -32_768, -32_769, -(2**31)]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 255, 65_535, 65_536])
def test_every_count_and_edge_is_as_msgpack_has_it(count: int) -> None:
    ids = [EDGES[at % len(EDGES)] for at in range(count)]
    assert kvpool_native.pack_ids(np.array(ids, "<i4").tobytes()) == msgpack.packb(ids)


def test_any_ids_are_as_msgpack_has_them(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        ids = [dice.getrandbits(dice.randint(1, 31)) * dice.choice([1, -1]) for _ in range(dice.randint(0, 300))]
        assert kvpool_native.pack_ids(np.array(ids, "<i4").tobytes()) == msgpack.packb(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_part_of_an_id_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        kvpool_native.pack_ids(bytes(size))
