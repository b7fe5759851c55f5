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


def test_a_preempted_request_comes_back_to_its_own_blocks() -> None:
    engine = PrefixEngine(8)
    engine.run("a", [1, 2, 3, 4, 5])
    engine.append("a", [6, 7])
    tokens = engine.tokens["a"]
    engine.free("a")
    assert engine.run("a", [*tokens, 8]) == 7
    engine.verify()
