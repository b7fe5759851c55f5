"""Numbers of TensorRT-LLM's layer groups: what a window needs, how the staging is divided, and parts of claims."""

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client.trtllm.claims.claim import BrokenClaim, Claim
from kvpool_client.trtllm.claims.staging import group_offsets, shard_bytes_of, staged_layers, staging_slots
from kvpool_client.trtllm.geometry import Geometry, GroupGeometry
from kvpool_client.trtllm.plan import SaveOrder

BLOCK = 4
GONE = -1


def _group(window: int = 0, layers: int = 2, name: str = "f") -> GroupGeometry:
    return GroupGeometry(layers, 2, 16, BLOCK, name, is_replicated=False, window=window)


@pytest.mark.parametrize("window", range(1, 20))
def test_a_window_needs_what_the_engine_still_has_at_a_blocks_end(window: int) -> None:
    group = _group(window)
    layout = Geometry((_group(), group)).layout(0, 1).of_group(1)
    assert layout.group is not None
    for chunks in range(12):
        needed = chunks - layout.group.chunks_of(chunks, BLOCK)
        assert group.needed_from(chunks) == needed
        if window > 1:
            assert group.oldest_block(chunks * BLOCK) == needed
        attended = [token // BLOCK for token in range(max(0, chunks * BLOCK + 1 - window), chunks * BLOCK)]
        assert not attended or attended[0] == group.oldest_block(chunks * BLOCK)


def test_one_group_of_full_attention_is_a_plain_layout() -> None:
    geometry = Geometry((_group(),))
    assert not geometry.has_windows
    assert geometry.layout(1, 2) == kv.Layout(
        layers=2,
        kv_heads=1,
        head_dim=16,
        dtype="uint8",
        chunk_tokens=BLOCK,
        planes=2,
        rank=1,
        world=2,
        format="f",
        block_tokens=BLOCK,
    )


def test_a_geometry_comes_back_from_the_board() -> None:
    geometry = Geometry((_group(), _group(8, name="w")))
    assert Geometry.from_bytes(geometry.to_bytes()) == geometry
    assert geometry.layout(0, 1) != Geometry((_group(), _group(8, name="v"))).layout(0, 1)


@pytest.mark.parametrize("windows", [(0,), (0, 9), (9,), (0, 9, 40), (5, 100)])
@pytest.mark.parametrize("shard_bytes", [1 << 14, 1 << 16, 1 << 20])
def test_the_staging_is_divided_without_overlap(windows: tuple[int, ...], shard_bytes: int) -> None:
    geometry = Geometry(tuple(_group(window, layers=1 + number) for number, window in enumerate(windows)))
    slots = staging_slots(geometry, shard_bytes)
    size = shard_bytes_of(geometry, slots)
    assert size <= shard_bytes
    assert all(count >= max(1, group.run) for count, group in zip(slots, geometry.groups, strict=True))
    memory = np.zeros(2 * size, np.uint8)
    for layers in (
        rows for shard in range(2) for of_group in [staged_layers(memory, geometry, shard, slots)] for rows in of_group
    ):
        for layer in layers:
            layer += 1
    assert (memory == 1).all()
    assert group_offsets(geometry, slots)[0] == 0


def test_a_staging_without_room_for_a_window_is_refused_with_the_size_that_it_needs() -> None:
    geometry = Geometry((_group(), _group(41)))
    least = 11 * 256
    assert staging_slots(geometry, least) == (1, 10)
    with pytest.raises(kv.InvalidArgument, match=f"at least {least}.*TLLM_KVPOOL_STAGING_MIB"):
        staging_slots(geometry, least - 1)


def test_a_claim_is_split_in_every_group() -> None:
    claim = Claim(2, 8, ((10, 11, 12, 13, 14, 15), (20, 21)))
    before, after = claim.split(7)
    assert (before, after) == (Claim(2, 7, ((10, 11, 12, 13, 14), (20,))), Claim(7, 8, ((15,), (21,))))
    before, after = claim.split(4)
    assert (before.slots, after.slots) == (((10, 11), ()), ((12, 13, 14, 15), (20, 21)))


def test_a_claim_ends_only_where_every_window_is_staged() -> None:
    geometry = Geometry((_group(), _group(8)))
    claim = Claim(2, 8, (tuple(range(6)), (20, 21)))
    assert [tokens for tokens in range(8, 33) if claim.can_end_at(tokens, geometry)] == [31, 32]
    assert Claim(6, 8, ((1, 2), (20, 21))).can_end_at(24, geometry), "the engine has all before"
    short = Claim(0, 2, ((1, 2), (20, 21)))
    assert all(short.can_end_at(tokens, geometry) for tokens in range(9))


def test_blocks_that_nothing_was_staged_for_break_a_claim() -> None:
    geometry = Geometry((_group(), _group(8)))
    claim = Claim(1, 4, ((1, 2, 3), (20, 21)))
    full = (5, 6, 7, 8, 9)
    assert claim.blocks((full, (GONE, GONE, 1, 2, 3))) == ((6, 7, 8), (1, 2))
    assert claim.blocks((full, (0, GONE, 1, 2, 3))) == ((6, 7, 8), (1, 2)), "the engine's own part"
    with pytest.raises(BrokenClaim, match="1 blocks of layer group 1 before chunk 2, expected none"):
        claim.blocks((full, (GONE, 4, 1, 2, 3)))
    assert claim.is_untaken((full, (0, 4, 1, 2, 3)), geometry)
    assert not claim.is_untaken((full, (0, GONE, 1, 2, 3)), geometry)


def test_two_orders_of_a_request_become_one() -> None:
    first = SaveOrder(7, b"1", b"", "", 0, 3, ((1, 2, 3), (9,)), (35,) * 3, ((), (2,)))
    later = SaveOrder(7, b"12", b"", "", 3, 5, ((4, 5), (8, 7)), (35,) * 2, ((), (3, 4)))
    both = first.followed_by(later)
    assert (both.first_chunk, both.end, both.tokens) == (0, 5, b"12")
    assert (both.block_ids, both.windows) == (((1, 2, 3, 4, 5), (9, 8, 7)), ((), (2, 3, 4)))
