"""The windows of a staging area: inside it, apart from each other, and each large enough for a layer."""

import itertools

import pytest

import kvpool_native
from kvpool_client.copying.staging_memory import WINDOW_BYTES, StagingArea

KIB = 1 << 10


@pytest.mark.parametrize("size", [64 * KIB, 68 * KIB, 1 << 20, WINDOW_BYTES, 3 * WINDOW_BYTES + 4 * KIB])
@pytest.mark.parametrize("layer_bytes", [1, 4 * KIB, 33 * KIB + 512, 64 * KIB])
def test_windows_lie_apart_and_hold_a_layer(size: int, layer_bytes: int) -> None:
    area = StagingArea(kvpool_native.Mapping.create("staging", size), layer_bytes)
    taken = []
    while (offset := area.take_window(0.0)) is not None:
        taken.append(offset)
    assert area.window_bytes >= layer_bytes
    edges = [*sorted(taken), size]
    assert all(low + area.window_bytes <= high for low, high in itertools.pairwise(edges))
    area.give_back(taken[0])
    assert area.take_window(0.0) == taken[0]
