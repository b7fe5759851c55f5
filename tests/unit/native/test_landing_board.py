"""Landings announced from Python: what is refused, and what readers see."""

import os

import pytest

import kvpool_native
from kvpool.ids import PAGE_BYTES

EXTENTS = 2


@pytest.fixture
def index() -> kvpool_native.Mapping:
    geometry = kvpool_native.DirectoryGeometry.plan(16 * PAGE_BYTES, 8 * PAGE_BYTES, 16, 16)
    made = kvpool_native.Mapping.create("index", geometry.index_bytes)
    kvpool_native.Directory(None, made, geometry, os.urandom(16))
    return made


def test_landed_extents_have_their_checksums(index: kvpool_native.Mapping) -> None:
    board, view = kvpool_native.LandingBoard(index), kvpool_native.IndexView(index)
    board.land(0, 0, (7).to_bytes(4, "little"))
    board.land(0, 1, (9).to_bytes(4, "little"))
    assert [view.checksum_at(0, extent) for extent in range(EXTENTS)] == [7, 9]
    board.fail(0)


@pytest.mark.parametrize(
    ("slot", "first", "checksums"),
    [
        (1 << 20, 0, bytes(4)),
        (1 << 32, 0, bytes(4)),
        (0, 0, b""),
        (0, 0, bytes(3)),
        (15, 0, bytes(4 << 20)),
        (0, (1 << 32) - 1, bytes(4)),
    ],
    ids=["outside", "another region", "none", "a part of one", "too many", "too far"],
)
def test_addresses_outside_the_index_are_refused(
    index: kvpool_native.Mapping, slot: int, first: int, checksums: bytes
) -> None:
    board = kvpool_native.LandingBoard(index)
    with pytest.raises(ValueError, match=r"no words in the index|checksums must be u32"):
        board.land(slot, first, checksums)


def test_only_a_writable_index_has_landings(index: kvpool_native.Mapping) -> None:
    with pytest.raises(ValueError, match="writable index"):
        kvpool_native.LandingBoard(kvpool_native.Mapping.attach(index.fd, index.size, writable=False))
    with pytest.raises(ValueError, match="writable index"):
        kvpool_native.LandingBoard(kvpool_native.Mapping.create("other", index.size))
    with pytest.raises(ValueError, match="no words"):
        kvpool_native.LandingBoard(index).fail(1 << 20)
