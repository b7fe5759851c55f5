"""Hybrid models on engines of different tensor-parallel sizes that share chunks through the vLLM connector."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.hybrid_engine import STATE, flip_at_the_next_load
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, prompt
from tests.rigs.vllm.specs import STATE_PADDING, WIDTH

pytestmark = pytest.mark.torch
StartEngine = Callable[..., Any]
HEADS = 4
WINDOW = 12
WINDOWS = (0, WINDOW, WINDOW)
RUN = -(-WINDOW // CHUNK)
WHOLE = 5
TOKENS = prompt(1, WHOLE * CHUNK + 3)
STATE_BYTES = BLOCK * WIDTH  # as many as a block of one head has
CHUNKS = WHOLE + 2 * RUN
SIZES = (1, 2, 4, 8)
# A size that stores, and those that read it: each size once of both, in the long form all with all.
RING: list[tuple[int, tuple[int, ...]]] = [(1, (8,)), (2, (1,)), (4, (2,)), (8, (4,))]
REQUESTS = 2


def slow(*values: Any) -> Any:
    """A case of the long form."""
    return pytest.param(*values, marks=pytest.mark.slow)


def joint(start: StartEngine, ranks: int, **more: Any) -> Any:
    options: dict[str, Any] = {"windows": WINDOWS, "heads": HEADS, "kvpool__head_groups": HEADS, **more}
    return start(ranks=ranks, **options)


@pytest.mark.parametrize(("writer", "readers"), [*RING, *(slow(size, SIZES) for size in SIZES)], ids=str)
def test_every_size_reads_what_another_one_has_stored(
    writer: int, readers: tuple[int, ...], start: StartEngine, daemon: Daemon
) -> None:
    assert joint(start, writer).ask("cold", TOKENS).offers == [0]
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == CHUNKS, "every chunk is whole, and stored once")
    for reader in readers:
        assert joint(start, reader).ask(f"of {reader}", TOKENS).offers == [WHOLE * CHUNK]
    assert int(daemon.stats()["dram.chunks"]) == CHUNKS
    assert not daemon.problems()


@pytest.mark.parametrize("windows", [(WINDOW,), (0, 8, 20)], ids=str)
def test_windows_alone_or_of_several_lengths_are_shared(windows: tuple[int, ...], start: StartEngine) -> None:
    joint(start, 2, windows=windows).ask("cold", TOKENS)
    for reader in (1, 4):
        assert joint(start, reader, windows=windows).ask("warm", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize("budget", [slow(7), BLOCK - 1, 3 * CHUNK + 1])
def test_prompts_in_pieces_are_stored_by_ranks_and_loaded_by_another_size(budget: int, start: StartEngine) -> None:
    for engine in (joint(start, 4, budget=budget), joint(start, 2, budget=budget)):
        requests = [
            Request(f"r{number}", prompt(number, 4 * CHUNK + number), new_tokens=3) for number in range(1, 1 + REQUESTS)
        ]
        engine.run(*requests)
    assert [request.offers for request in requests] == [[4 * CHUNK]] * REQUESTS


@pytest.mark.parametrize("row", [0, WHOLE, WHOLE + RUN], ids=["full", "window", "other-window"])
def test_a_flipped_bit_fails_the_load_of_all_ranks(row: int, start: StartEngine) -> None:
    joint(start, 1).ask("cold", TOKENS)
    engine = joint(start, 2)
    flip_at_the_next_load(engine, row)
    assert engine.ask("spoilt", TOKENS).offers == [WHOLE * CHUNK, 0]
    assert engine.failed == 1
    assert joint(start, 4).ask("again", TOKENS).offers == [WHOLE * CHUNK]


def test_engines_without_head_groups_share_with_their_own_size_alone(start: StartEngine) -> None:
    joint(start, 2).ask("cold", TOKENS)
    assert start(windows=WINDOWS, heads=HEADS, ranks=2).ask("apart", TOKENS).offers == [0]
    assert joint(start, 2, kvpool__head_groups=2).ask("fewer groups", TOKENS).offers == [0]
    assert start(windows=WINDOWS, heads=HEADS, ranks=2).ask("apart again", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize(
    "model",
    [
        {"is_odd": True},  # the scheduler does not see how many heads the second layer of a group has
        {
            "windows": (STATE, 0),
            "of_states": {"page_size_bytes": STATE_BYTES, "shapes": ((STATE_BYTES - STATE_PADDING,),)},
        },
    ],
    ids=["uneven-layers", "states"],
)
def test_layers_that_are_not_divided_by_known_heads_share_with_their_own_size_alone(
    model: dict[str, Any], start: StartEngine
) -> None:
    """A rank has one head in both sizes: of models of 2 and 4 heads."""
    two, four = {"heads": 2, "kvpool__head_groups": 2, **model}, {"heads": 4, "kvpool__head_groups": 4, **model}
    joint(start, 2, **two).ask("cold", TOKENS)
    assert joint(start, 2, **two).ask("of the same size", TOKENS).offers == [WHOLE * CHUNK]
    assert joint(start, 4, **four).ask("of another size", TOKENS).offers == [0]


DIVIDED = [
    DividedStates(kind, is_by_channel) for kind in ("gdn_attention", "mamba2") for is_by_channel in (False, True)
]
ONE_GROUP = DividedStates("mamba2", has_one_group=True)
STATES = (STATE, 0, STATE)


def joint_states(start: StartEngine, ranks: int, **more: Any) -> Any:
    """Of a model whose states are divided for up to eight ranks, and whose KV heads for four."""
    options: dict[str, Any] = {"windows": STATES, "divided": DIVIDED[0], "kvpool__head_groups": max(SIZES), **more}
    return joint(start, ranks, **options)


@pytest.mark.parametrize(
    ("writer", "readers", "divided"),
    [
        *((writer, readers, DIVIDED[0]) for writer, readers in RING),
        *((4, (2,), other) for other in DIVIDED[1:]),
        *(slow(size, SIZES, DIVIDED[0]) for size in SIZES),
        *(slow(4, SIZES, other) for other in DIVIDED[1:]),
    ],
    ids=str,
)
def test_every_size_reads_the_states_that_another_one_has_stored(
    writer: int, readers: tuple[int, ...], divided: DividedStates, start: StartEngine, daemon: Daemon
) -> None:
    sections = 3  # the two narrow projections, the wide one, the recurrent tensor
    assert joint_states(start, writer, divided=divided).ask("cold", TOKENS).offers == [0]
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == WHOLE + 2 * sections, "each chunk is stored once")
    for reader in readers:
        assert joint_states(start, reader, divided=divided).ask(f"of {reader}", TOKENS).offers == [WHOLE * CHUNK]
    assert int(daemon.stats()["dram.chunks"]) == WHOLE + 2 * sections
    other = DIVIDED[(DIVIDED.index(divided) + 1) % len(DIVIDED)]
    assert joint_states(start, 2, divided=other).ask("ordered otherwise", TOKENS).offers == [0]
    assert not daemon.problems()


@pytest.mark.parametrize(("writer", "readers"), [(1, (4,)), (4, (2, 8)), slow(1, SIZES), slow(4, SIZES)], ids=str)
def test_one_group_of_b_and_c_is_stored_once_and_found_by_every_size(
    writer: int, readers: tuple[int, ...], start: StartEngine, daemon: Daemon
) -> None:
    joint_states(start, writer, divided=ONE_GROUP).ask("cold", TOKENS)
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == WHOLE + 2 * 3, "each chunk is stored once")
    for reader in readers:
        assert joint_states(start, reader, divided=ONE_GROUP).ask(f"of {reader}", TOKENS).offers == [WHOLE * CHUNK]
    assert int(daemon.stats()["dram.chunks"]) == WHOLE + 2 * 3


def test_states_of_another_data_type_of_the_same_size_are_others(start: StartEngine) -> None:
    joint_states(start, 2).ask("cold", TOKENS)
    other = joint_states(start, 2, divided=replace(DIVIDED[0], item="torch.int8"))
    assert other.ask("of another type", TOKENS).offers == [0]


@pytest.mark.parametrize("budget", [7, slow(BLOCK), 3 * CHUNK + 1])
def test_states_of_prompts_in_pieces_are_stored_by_ranks_and_loaded_by_another_size(
    budget: int, start: StartEngine
) -> None:
    for engine in (joint_states(start, 4, budget=budget), joint_states(start, 8, budget=budget)):
        requests = [
            Request(f"r{number}", prompt(number, 4 * CHUNK + number), new_tokens=3) for number in range(1, 1 + REQUESTS)
        ]
        engine.run(*requests)
    assert [request.offers for request in requests] == [[4 * CHUNK]] * REQUESTS


@pytest.mark.parametrize("row", [1, slow(2), 3, slow(4), slow(5), 6], ids=lambda row: f"section {row}")
def test_a_flipped_bit_of_a_state_fails_the_load_of_all_ranks(row: int, start: StartEngine) -> None:
    """Leased are the sections of the first group of states, the full chunks, then those of the second."""
    joint_states(start, 1).ask("cold", TOKENS)
    engine = joint_states(start, 2)
    flip_at_the_next_load(engine, row - 1 if row <= 3 else row - 1 + WHOLE)
    assert engine.ask("spoilt", TOKENS).offers == [WHOLE * CHUNK, 0]
    assert engine.failed == 1
    assert joint_states(start, 4).ask("again", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize(("ranks", "groups"), [(8, 4), (2, 5)], ids=str)
def test_states_that_ranks_or_groups_cannot_be_divided_for_are_refused(
    ranks: int, groups: int, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = joint_states(start, ranks, kvpool__head_groups=groups)
    assert engine.ask("cold", TOKENS).offers == [0]
    assert f"kvpool.head_groups is {groups}, expected a divisor of" in caplog.text


@pytest.mark.parametrize(("ranks", "groups"), [(2, 3), (2, 1), (4, 2)], ids=str)
def test_head_groups_that_ranks_or_heads_cannot_be_divided_for_are_refused(
    ranks: int, groups: int, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = joint(start, ranks, kvpool__head_groups=groups)
    assert engine.ask("cold", TOKENS).offers == [0]
    assert f"kvpool.head_groups is {groups}, expected a divisor of 4 KV heads" in caplog.text


# The model's layers in three groups, of each of which two stages have one.
STAGED = ((0, 3), (1, 4), (2, 5))


# Ranks and stages of an engine that stores, and of one that reads; in the long form all with all.
STAGED_WRITERS: list[tuple[int, tuple[int, ...]]] = [(1, (3, 3)), (2, (3, 3)), (2, ()), (4, (3, 3))]
STAGED_READERS: list[tuple[int, tuple[int, ...]]] = [(4, ()), (1, ()), (1, (3, 3)), (2, (3, 3))]
STAGED_RING = [(writer, (reader,)) for writer, reader in zip(STAGED_WRITERS, STAGED_READERS, strict=True)]


@pytest.mark.parametrize("states", [False, True], ids=["windows", "states"])
@pytest.mark.parametrize(
    ("writer", "readers"), [*STAGED_RING, *(slow(writer, STAGED_READERS) for writer in STAGED_WRITERS)], ids=str
)
def test_stages_share_with_every_other_engine(
    writer: tuple[int, tuple[int, ...]],
    readers: list[tuple[int, tuple[int, ...]]],
    states: bool,
    start: StartEngine,
    daemon: Daemon,
) -> None:
    of_model: dict[str, Any] = {"layers": STAGED, "kvpool__head_groups": max(SIZES) if states else HEADS}
    make = joint_states if states else joint
    ranks, stages = writer
    assert make(start, ranks, stages=stages, **of_model).ask("cold", TOKENS).offers == [0]
    chunks = WHOLE + 2 * 3 if states else CHUNKS
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == chunks, "every chunk is whole, and stored once")
    for reader, other in readers:
        assert make(start, reader, stages=other, **of_model).ask("warm", TOKENS).offers == [WHOLE * CHUNK]
    assert int(daemon.stats()["dram.chunks"]) == chunks
    assert not daemon.problems()


@pytest.mark.parametrize("budget", [7, 3 * CHUNK + 1])
def test_prompts_in_pieces_are_stored_by_stages_and_loaded_by_them(budget: int, start: StartEngine) -> None:
    for engine in (joint(start, 2, layers=STAGED, stages=(3, 3), budget=budget), joint(start, 2, layers=STAGED)):
        requests = [
            Request(f"r{number}", prompt(number, 4 * CHUNK + number), new_tokens=3) for number in range(1, 1 + REQUESTS)
        ]
        engine.run(*requests)
    assert [request.offers for request in requests] == [[4 * CHUNK]] * REQUESTS


def test_a_flipped_bit_of_one_stage_fails_the_load_of_all(start: StartEngine) -> None:
    joint(start, 1, layers=STAGED).ask("cold", TOKENS)
    engine = joint(start, 1, layers=STAGED, stages=(3, 3))
    engine.ask("begins", prompt(2, 3))
    flip_at_the_next_load(engine, 0)
    assert engine.ask("spoilt", TOKENS).offers == [WHOLE * CHUNK, 0]
    assert engine.failed == 1


def test_a_vllm_without_a_handshake_by_stage_is_refused(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake_vllm.KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware")
    engine = joint(start, 1, layers=STAGED, stages=(3, 3))
    assert [engine.ask(name, TOKENS).offers for name in ("cold", "again")] == [[0], [0]]
    assert "have no set_xfer_handshake_metadata_pp_aware" in caplog.text


def test_a_start_that_fails_with_all_stages_known_is_a_miss(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a way that no engine was seen to fail in: it is in the middle of its first step."""
    from kvpool_client.vllm import connector

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise TypeError("nobody knows why")

    monkeypatch.setattr(connector, "geometry_of", fail)
    engine = joint(start, 1, layers=STAGED, stages=(3, 3))
    assert [engine.ask(name, TOKENS).offers for name in ("cold", "again")] == [[0], [0]]
    assert "a late start failed" in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kvpool__head_groups": 0}, "in an engine of several stages"),
        ({"layers": ((0, 3), (1, 2), (4, 5))}, "stages have layers of vLLM's groups [0, 1], [0, 2]"),
    ],
    ids=["apart", "other-kinds"],
)
def test_stages_that_do_not_know_each_other_are_refused(
    options: dict[str, Any], why: str, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = joint(start, 1, **{"layers": STAGED, "stages": (3, 3), **options})
    assert engine.ask("cold", TOKENS).offers == [0]
    assert engine.ask("again", TOKENS).offers == [0]
    assert why in caplog.text
