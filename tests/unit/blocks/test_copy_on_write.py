"""Copy-on-write: forks, part blocks, forks of forks, rewinding into shared blocks, preemption."""

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.blocks.prefix_engine import PrefixEngine

pytestmark = pytest.mark.torch


def test_of_two_references_the_one_who_appends_copies_and_the_other_writes_in_place() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5, 6])
    assert engine.fork("a", "b")
    assert engine.blocks.block_ids("a") == engine.blocks.block_ids("b")
    shared = engine.blocks.block_ids("a")
    assert engine.append("a", [7])
    assert engine.append("b", [8])
    assert engine.blocks.block_ids("b") == shared
    assert engine.blocks.block_ids("a")[0] == shared[0]
    assert engine.blocks.block_ids("a")[1] != shared[1]
    assert engine.blocks.stats()["copied_blocks"] == 1
    engine.verify()


def test_a_fork_at_a_blocks_end_copies_nothing() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4])
    assert engine.fork("a", "b")
    assert engine.append("a", [5])
    assert engine.append("b", [6])
    assert engine.blocks.stats()["copied_blocks"] == 0
    engine.verify()


def test_a_fork_of_a_fork_copies_until_one_is_alone() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5])
    assert engine.fork("a", "b")
    assert engine.fork("b", "c")
    engine.free("a")
    assert engine.append("c", [6])
    assert engine.append("b", [7])
    assert engine.blocks.stats()["copied_blocks"] == 1
    engine.verify()
    engine.free("b")
    engine.free("c")
    assert engine.blocks.num_free_blocks == 8


def test_a_fork_shares_nothing_that_is_not_computed() -> None:
    engine = PrefixEngine(12)
    engine.start("a", list(range(11)))
    engine.compute("a", 6)
    assert engine.fork("a", "b")
    assert engine.computed["b"] == 6
    assert engine.blocks.block_ids("b")[0] == engine.blocks.block_ids("a")[0]
    assert set(engine.blocks.block_ids("b")[1:]).isdisjoint(engine.blocks.block_ids("a"))
    engine.compute("a")
    engine.compute("b")
    engine.verify()


def test_a_fork_beside_reserved_room_gets_a_tail_of_its_own() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5])
    assert engine.blocks.reserve("a", 2)
    assert engine.fork("a", "b")
    assert engine.blocks.block_ids("b")[1] != engine.blocks.block_ids("a")[1]
    assert engine.append("a", [6])
    assert engine.append("b", [7])
    engine.verify()


def test_no_room_for_the_copy_is_a_refusal_and_the_fork_goes_on_later() -> None:
    engine = PrefixEngine(3)
    engine.run("x", [9])
    engine.run("a", [1, 2, 3, 4, 5])
    assert engine.fork("a", "b")
    assert not engine.append("a", [6])
    assert engine.blocks.length("a") == 5
    engine.free("x")
    assert engine.append("a", [6])
    engine.verify()


def test_no_room_for_a_fork_is_a_refusal() -> None:
    engine = PrefixEngine(2)
    engine.start("a", [1, 2, 3, 4, 5])
    assert not engine.fork("a", "b")
    engine.compute("a")
    engine.verify()


def test_a_block_that_the_tree_has_is_copied_after_rewinding_into_it() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5, 6, 7, 8])
    full = engine.blocks.block_ids("a")[1]
    engine.rewind("a", 2)
    engine.verify()
    assert engine.append("a", [9])
    assert engine.blocks.block_ids("a")[1] != full
    assert engine.run("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    engine.verify()


def test_a_private_copy_of_a_known_block_is_written_in_place_after_rewinding() -> None:
    engine = PrefixEngine(8)
    for name in ("a", "b"):
        engine.start(name, [1, 2, 3, 4])
    engine.compute("a")
    engine.compute("b")
    own = engine.blocks.block_ids("b")
    engine.rewind("b", 1)
    assert engine.append("b", [9])
    assert engine.blocks.block_ids("b") == own
    engine.verify()


def test_rewinding_everything_and_going_on() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5])
    engine.rewind("a", 5)
    engine.verify()
    assert engine.blocks.block_ids("a") == ()
    assert engine.append("a", [6, 7])
    engine.verify()


def test_a_preempted_request_comes_back_to_its_own_blocks() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5])
    engine.append("a", [6, 7])
    tokens = engine.tokens["a"]
    engine.free("a")
    assert engine.run("a", [*tokens, 8]) == 7
    engine.verify()


def test_a_request_cancelled_before_it_computed_leaves_nothing() -> None:
    engine = PrefixEngine(8)
    engine.start("a", list(range(10)))
    engine.free("a")
    assert engine.blocks.num_free_blocks == 8
    assert engine.run("b", list(range(10))) == 0
    engine.verify()
