"""Extents of summaries in saves: each has a checksum in the commit, and none is read by others before it."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvpool.errors import ProtocolError
from kvpool.ids import ReservationId
from kvpool.index.reservations import ReservedRun
from kvpool.index.staged_slots import Extents
from kvpool.key_column import KeyColumn
from kvpool.layout import Layout
from kvpool.pool.writers.commit_columns import CommitColumns, divide
from kvpool.pool.writers.followed_saves import FollowedSaves, extents_of

LAYOUT = Layout(layers=3, kv_heads=1, head_dim=32, dtype="float16", chunk_tokens=32, summaries="clusters7")
CHUNKS = 4
SESSION: Any = SimpleNamespace(layout=LAYOUT)


class Directory:
    """Has what was landed: the first extent, and the checksums."""

    def __init__(self) -> None:
        self.landed: list[tuple[int, list[list[int]]]] = []

    def land_saved(self, _reservation: int, _first: int, chunks: int, extent: int, checksums: bytes) -> None:
        self.landed.append((extent, np.frombuffer(checksums, "<u4").reshape(chunks, -1).tolist()))


class Listener:
    """Has how many saves were noted."""

    def __init__(self) -> None:
        self.noted = 0

    def note_save(self, keys: KeyColumn) -> None:
        self.noted += 1

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """Nothing is asked about it."""


def landed(extents: range, *, kv_extents: int = LAYOUT.layers) -> tuple[Directory, Listener]:
    """After these extents of all chunks have landed, with checksums 10 · chunk + extent."""
    directory, listener = Directory(), Listener()
    saves = FollowedSaves(cast(Any, directory))
    saves.listen(listener)
    run = ReservedRun(SESSION, CHUNKS, LAYOUT.extents, kv_extents, [ReservationId(1)])
    saves.begin_save(run, KeyColumn(bytes(32 * CHUNKS)))
    sums = np.array([[10 * chunk + extent for extent in extents] for chunk in range(CHUNKS)], "<u4")
    saves.land(run, Extents(range(CHUNKS), extents), sums.tobytes())
    return directory, listener


def test_the_layout_of_these_tests_has_summaries() -> None:
    assert LAYOUT.extents > LAYOUT.layers


@pytest.mark.parametrize("end", [LAYOUT.layers - 1, LAYOUT.layers, LAYOUT.extents])
def test_others_read_all_layers_but_the_last_before_the_commit(end: int) -> None:
    directory, listener = landed(range(end))
    assert directory.landed == [(0, [[10 * chunk, 10 * chunk + 1] for chunk in range(CHUNKS)])]
    assert listener.noted == 1


@pytest.mark.parametrize("extents", [range(2, 3), range(2, LAYOUT.extents), range(3, LAYOUT.extents)])
def test_the_last_layer_and_the_summaries_are_not_shown(extents: range) -> None:
    directory, listener = landed(extents)
    assert (directory.landed, listener.noted) == ([], 0)


def test_a_layout_of_one_layer_is_not_followed() -> None:
    directory, listener = landed(range(1), kv_extents=1)
    assert (directory.landed, listener.noted) == ([], 0)


def test_landed_extents_are_those_of_a_stored_chunk() -> None:
    run = ReservedRun(SESSION, CHUNKS, LAYOUT.extents, LAYOUT.layers, [ReservationId(1)])
    whole = bytes(4 * CHUNKS * LAYOUT.extents)
    assert extents_of(run, 0, whole) == range(LAYOUT.extents)
    with pytest.raises(ProtocolError, match="a chunk has 4"):
        extents_of(run, 1, whole)


def test_a_commit_has_a_checksum_for_each_extent() -> None:
    run = ReservedRun(SESSION, 5, LAYOUT.extents, LAYOUT.layers, [ReservationId(1)])
    (part,) = divide(CommitColumns(bytes(4 * LAYOUT.extents * 5)), [run])
    assert part.chunks == 5
    with pytest.raises(ProtocolError, match="expected whole rows of the next of 5 chunks"):
        divide(CommitColumns(bytes(4 * LAYOUT.layers * 5)), [run])
