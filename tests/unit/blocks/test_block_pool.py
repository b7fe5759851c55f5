"""Block pool alone: full, miss, reuse of blocks and of heads of blocks, retention, refusals."""

from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.errors import InvalidArgument

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks import BlockPool
from tests.rigs.blocks.prefix_engine import PrefixEngine
from tests.rigs.clock import HandClock

pytestmark = pytest.mark.torch


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that no other seed shares."""
    return [1000 * seed + number for number in range(count)]


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    engine = PrefixEngine(4)
    assert engine.run("a", prompt(1, 12)) == 0
    assert engine.start("b", prompt(2, 9)) is None
    assert engine.blocks.num_free_blocks == 1
    assert engine.run("c", prompt(3, 4)) == 0
    assert not engine.blocks.append("a", [1])
    assert engine.blocks.length("a") == 12
    engine.verify()


def test_a_request_that_no_empty_pool_has_blocks_for_raises_with_both_numbers_and_takes_nothing() -> None:
    engine = PrefixEngine(3)
    with pytest.raises(InvalidArgument, match="'a' needs 4 blocks for 13 tokens, expected at most num_blocks 3"):
        engine.start("a", prompt(1, 13))
    assert engine.blocks.num_free_blocks == 3
    engine.run("a", prompt(1, 7))
    engine.start("b", prompt(2, 1))
    assert not engine.blocks.append("a", prompt(3, 5))
    assert not engine.blocks.reserve("a", 5)
    with pytest.raises(InvalidArgument, match="'a' needs 4 blocks for 13 tokens, expected at most num_blocks 3"):
        engine.blocks.append("a", prompt(3, 6))
    with pytest.raises(InvalidArgument, match="'a' needs 5 blocks for 17 tokens, expected at most num_blocks 3"):
        engine.blocks.reserve("a", 10)
    assert (engine.blocks.length("a"), len(engine.blocks.block_ids("a"))) == (7, 2)
    engine.verify()


def test_integers_of_numpy_are_integers() -> None:
    none, one, three, four = (cast(int, np.int64(number)) for number in (0, 1, 3, 4))
    blocks = BlockPool(
        layers=1, num_blocks=four, tokens_per_block=four, kv_heads=1, head_dim=four, dtype="float32", device="cpu"
    )
    assert blocks.allocate("a", prompt(1, 3)) is not None
    assert blocks.reserve("a", one)
    assert blocks.computed("a", none, three)
    assert blocks.buffers(none).shape == (4, 2, 4, 1, 4)


def test_an_allocation_whose_request_was_freed_has_no_blocks() -> None:
    engine = PrefixEngine(8)
    blocks = engine.blocks
    allocations = [blocks.allocate("a", prompt(1, 6)), blocks.fork("a", "b")]
    for request, allocation in zip("ab", allocations, strict=True):
        assert allocation is not None
        assert allocation.block_ids
        blocks.free(request)
        for call in (
            lambda: allocation.block_ids,  # noqa: B023 - called at once
            lambda: allocation.wait_layer(0),  # noqa: B023
            allocation.settle,
            lambda: allocation.prefill(lambda start: start),  # noqa: B023
        ):
            with pytest.raises(InvalidArgument, match=r"has ended: .* or its request freed"):
                call()
        assert "blocks" in repr(allocation)


def test_after_close_every_verb_refuses_and_names_it() -> None:
    engine = PrefixEngine(4)
    engine.run("a", prompt(1, 6))
    blocks = engine.blocks
    (block, _) = blocks.block_ids("a")
    blocks.close()
    blocks.close()
    for call in (
        lambda: blocks.allocate("b", [1]),
        lambda: blocks.append("a", [1]),
        lambda: blocks.reserve("a", 1),
        lambda: blocks.keep_room("a", 0),
        lambda: blocks.computed("a", 0, 1),
        lambda: blocks.rewind("a", 1),
        lambda: blocks.fork("a", "b"),
        lambda: blocks.free("a"),
        lambda: blocks.block_ids("a"),
        lambda: blocks.length("a"),
        lambda: blocks.priority_of(block),
    ):
        with pytest.raises(
            InvalidArgument, match="the block pool is <BlockPool 4/4 blocks free, closed>, expected an open one"
        ):
            call()
    assert blocks.buffers(0).shape[0] == 4
    assert blocks.stats()["requests"] == 0
    assert blocks.num_free_blocks == 4
    assert blocks.verify() == []


@pytest.mark.parametrize(("common", "reused"), [(1, 1), (3, 3), (5, 5), (6, 6), (7, 6), (9, 6)])
def test_the_head_of_a_block_is_copied_also_of_the_last_part_block(common: int, reused: int) -> None:
    engine = PrefixEngine(16)
    engine.run("a", prompt(1, 6))
    engine.free("a")
    tokens = prompt(1, min(common, 6)) + [99] * 4
    assert engine.run("b", tokens) == reused
    engine.verify()


def test_the_longest_head_among_many_siblings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_blocks.tree.child_order.RUN_MAX", 32)
    engine = PrefixEngine(512)
    for number in range(150):
        engine.run(number, [1, number, number % 7, 3, 9])
    assert engine.run("x", [1, 70, 0, 8, 8]) == 3
    assert engine.run("y", [1, 149, 2, 3, 8]) == 4
    assert engine.run("z", [1, 5000, 1, 3, 8]) == 1
    assert engine.blocks.verify() == []


def test_leaves_are_evicted_before_their_parents_and_the_oldest_first() -> None:
    clock = HandClock()
    engine = PrefixEngine(6, clock=clock)
    for name in ("old", "new"):
        engine.run(name, prompt(len(name) + (name == "new"), 12))
        clock.advance(1.0)
        engine.free(name)
    engine.run("c", prompt(9, 8))
    assert engine.blocks.stats()["evicted_blocks"] == 2
    engine.free("c")
    assert engine.start("old", prompt(3, 12)).reused_tokens == 4  # type: ignore[union-attr]
    engine.verify()


def test_retained_blocks_outlive_newer_ones_until_their_duration_ends() -> None:
    clock = HandClock()
    for seconds, reused in ((0.0, 7), (11.0, 0)):
        engine = PrefixEngine(4, clock=clock)
        engine.run("kept", prompt(1, 8), retention=[kv.TokenRange(0, None, 80, 10.0)])
        engine.free("kept")
        clock.advance(seconds)
        engine.run("b", prompt(2, 8))
        engine.free("b")
        engine.run("c", prompt(3, 8))
        engine.free("c")
        assert engine.run("again", prompt(1, 8)) == reused
        engine.verify()


def test_salts_and_adapters_are_never_shared() -> None:
    engine = PrefixEngine(32)
    scopes: list[dict[str, Any]] = [{}, {"salt": b""}, {"salt": b"x"}, {"adapter": "x"}, {"salt": b"x", "adapter": "x"}]
    for number, scope in enumerate(scopes):
        assert engine.run(number, prompt(1, 9), **scope) == 0
    for number, scope in enumerate(scopes):
        assert engine.run(10 + number, prompt(1, 9), **scope) == 8
    engine.verify()


def test_reports_behind_a_gap_are_refused() -> None:
    engine = PrefixEngine(8)
    engine.start("a", prompt(1, 12))
    assert not engine.blocks.computed("a", 4, 12)
    assert engine.run("b", prompt(1, 12)) == 0
    engine.verify()


def test_a_callers_mistakes_raise_and_name_the_value() -> None:
    engine = PrefixEngine(4)
    engine.run("a", prompt(1, 4))
    for call, words in (
        (lambda: engine.blocks.allocate("a", [1]), "'a' is allocated already"),
        (lambda: engine.blocks.allocate("b", []), "'b' has no tokens"),
        (lambda: engine.blocks.allocate("b", [1.5]), "expected one dimension of integers"),
        (lambda: engine.blocks.allocate("b", [[1, 2]]), "of int64, expected one dimension of integers: pass tokens"),
        (lambda: engine.blocks.append("a", [[1, 2]]), "of int64, expected one dimension of integers: pass tokens"),
        (lambda: engine.blocks.append("b", [1]), "'b' is not allocated"),
        (lambda: engine.blocks.free("b"), "'b' is not allocated"),
        (lambda: engine.blocks.fork("a", "a"), "'a' is allocated already"),
        (lambda: engine.blocks.rewind("a", 5), "tokens is 5, expected 0..4"),
        (lambda: engine.blocks.reserve("a", -1), "tokens is -1, expected a number from 0"),
        (lambda: engine.blocks.keep_room("a", 1), "tokens is 1, expected 0..0"),
        (lambda: engine.blocks.allocate("b", [1], salt="tenant"), "salt is str, expected bytes"),  # type: ignore[arg-type]
        (lambda: engine.blocks.allocate("b", [1], adapter=b"a"), "adapter is b.a., expected text"),  # type: ignore[arg-type]
        (lambda: engine.blocks.computed("a", 0, 5), "0 to 5"),
        (lambda: engine.blocks.computed("a", 0, 3.5), "0 to 3.5"),  # type: ignore[arg-type]  # the mistake
        (lambda: engine.blocks.computed("a", 0.0, 4), "0.0 to 4"),  # type: ignore[arg-type]  # the mistake
        (lambda: engine.blocks.buffers(2), "layer is 2, expected 0..1"),
        (lambda: engine.blocks.buffers(-1), "layer is -1, expected 0..1"),
        (lambda: engine.blocks.buffers(1.0), "layer is 1.0, expected 0..1"),  # type: ignore[arg-type]  # the mistake
        (lambda: PrefixEngine(0), "num_blocks is 0"),
        (lambda: engine.blocks.allocate("b", [1], retention=[kv.TokenRange(0, None, 101)]), "priority is 101"),
    ):
        with pytest.raises(InvalidArgument, match=words.replace("(", r"\(")):
            call()
    engine.verify()


@pytest.mark.parametrize("wait_s", [-0.1, 10.5, float("nan"), "20ms", True])
def test_a_wait_for_offloads_that_no_call_could_keep_is_refused_at_the_start(wait_s: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"offload_wait_s is {wait_s!r}, expected seconds from 0 to 10"):
        BlockPool(
            layers=1,
            num_blocks=1,
            tokens_per_block=1,
            kv_heads=1,
            head_dim=1,
            dtype="uint8",
            device="cpu",
            offload_wait_s=wait_s,
        )


def test_a_dtype_that_no_layout_has_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="dtype is 'complex64'"):
        BlockPool(layers=1, num_blocks=1, tokens_per_block=1, kv_heads=1, head_dim=1, dtype="complex64", device="cpu")


def test_without_a_pool_all_of_the_geometry_is_named() -> None:
    for named, words in (
        ({"layers": 1, "kv_heads": 1, "head_dim": 1}, "geometry is dtype=None without a pool"),
        ({"layers": 1, "head_dim": 1}, "geometry is kv_heads=None, dtype=None without a pool"),
        ({"layers": 0, "kv_heads": 1, "head_dim": 1, "dtype": "uint8"}, "layers is 0, expected a number from 1"),
    ):
        geometry: dict[str, Any] = named
        with pytest.raises(InvalidArgument, match=words):
            BlockPool(num_blocks=1, tokens_per_block=1, device="cpu", **geometry)
