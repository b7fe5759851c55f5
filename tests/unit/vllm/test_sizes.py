"""Engines of different tensor-parallel sizes and pipeline stages that share chunks through the vLLM connector, of plain models,
of hybrid ones with windows, and of those with states."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.config import config_of
from tests.rigs.vllm.divided_states import DividedStates
from tests.rigs.vllm.model import STATE
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, ask, counted, flip_at_the_next_load, prompt
from tests.rigs.vllm.specs import STATE_PADDING, WIDTH

HEADS, WHOLE = 4, 5
TOKENS = prompt(1, WHOLE * CHUNK + 3)
WINDOW = 12
RUN = -(-WINDOW // CHUNK)
# The model's layers in three groups, of each of which two stages have one.
STAGED = ((0, 3), (1, 4), (2, 5))
STATE_BYTES = BLOCK * WIDTH  # as many as a block of one head has
SECTIONS = 3  # of a state: the two narrow projections, the wide one, the recurrent tensor
DIVIDED = [
    DividedStates(kind, is_by_channel) for kind in ("gdn_attention", "mamba2") for is_by_channel in (False, True)
]
REQUESTS = 3


def states(divided: DividedStates) -> tuple[dict[str, Any], int]:
    """Of a model whose states are divided for up to eight ranks, and whose KV heads for four."""
    options = {"windows": (STATE, 0, STATE), "layers": STAGED, "divided": divided, "kvpool__head_groups": 8}
    return options, WHOLE + 2 * SECTIONS


# Options of a model's engines, and how many chunks TOKENS are stored as.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, WHOLE),
    "windows": ({"windows": (0, WINDOW, WINDOW), "layers": STAGED}, WHOLE + 2 * RUN),
    **{f"states-{number}": states(divided) for number, divided in enumerate(DIVIDED)},
    "one-group": states(DividedStates("mamba2", has_one_group=True)),
}
# Ranks, and the layers of each stage; those of a plain model are three.
Size = tuple[int, tuple[int, ...]]
SIZES: list[Size] = [(1, ()), (2, ()), (4, ()), (8, ())]
ONE, TWO, FOUR, EIGHT = SIZES
STAGES: list[Size] = [(1, (2, 1)), (2, (1, 2))]
HYBRID_STAGES: list[Size] = [(1, (3, 3)), (2, (3, 3)), (4, (3, 3))]
# A size that stores, and one that reads it: each size once of both; in the long form all with all.
PLAIN_RING = [
    (ONE, EIGHT),
    (TWO, STAGES[0]),
    (FOUR, TWO),
    (EIGHT, ONE),
    (STAGES[0], STAGES[1]),
    (STAGES[1], FOUR),
]
RING = [(ONE, EIGHT), (TWO, ONE), (FOUR, TWO), (EIGHT, FOUR)]
STAGED_RING = [
    (HYBRID_STAGES[0], FOUR),
    (HYBRID_STAGES[1], ONE),
    (TWO, HYBRID_STAGES[0]),
    (HYBRID_STAGES[2], HYBRID_STAGES[1]),
]


def slow(*values: Any) -> Any:
    """A case of the long form."""
    return pytest.param(*values, marks=pytest.mark.slow)


def joint(start: StartEngine, model: str, size: Size, **more: Any) -> Any:
    ranks, stages = size
    options = {"heads": HEADS, "kvpool__head_groups": HEADS, **MODELS[model][0], **more}
    if "windows" not in options:
        options["replicas"] = max(1, ranks // HEADS)
    return start(ranks=ranks, **({"stages": stages} if stages else {}), **options)


@pytest.mark.parametrize(
    ("model", "writer", "readers"),
    [
        *(("plain", writer, [reader]) for writer, reader in PLAIN_RING),
        *((model, writer, [reader]) for model in ("windows", "states-0") for writer, reader in RING + STAGED_RING),
        *((f"states-{number}", FOUR, [TWO]) for number in (1, 2, 3)),
        ("one-group", ONE, [FOUR]),
        ("one-group", FOUR, [TWO, EIGHT]),
        *(slow("plain", writer, SIZES + STAGES) for writer in SIZES + STAGES),
        *(slow(model, writer, SIZES) for model in ("windows", "states-0") for writer in SIZES),
        *(
            slow(model, writer, [reader for _, reader in STAGED_RING])
            for model in ("windows", "states-0")
            for writer, _ in STAGED_RING
        ),
        *(slow(f"states-{number}", FOUR, SIZES) for number in (1, 2, 3)),
        *(slow("one-group", writer, SIZES) for writer in (ONE, FOUR)),
    ],
    ids=str,
)
def test_every_size_reads_what_another_one_has_stored(
    model: str, writer: Size, readers: list[Size], start: StartEngine, daemon: Daemon
) -> None:
    _, chunks = MODELS[model]
    assert ask(joint(start, model, writer), "cold", TOKENS).offers == [0]
    wait_until(lambda: int(daemon.stats()["dram.chunks"]) == chunks, "every chunk is whole, and stored once")
    for reader in readers:
        engine = joint(start, model, reader)
        assert ask(engine, "warm", TOKENS).offers == [WHOLE * CHUNK], reader
        assert counted(engine, "saved_chunks") == 0
    assert int(daemon.stats()["dram.chunks"]) == chunks
    assert not daemon.problems()


@pytest.mark.parametrize("windows", [(WINDOW,), (0, 8, 20)], ids=str)
def test_windows_alone_or_of_several_lengths_are_shared(windows: tuple[int, ...], start: StartEngine) -> None:
    of_model: dict[str, Any] = {"windows": windows, "layers": ()}
    ask(joint(start, "windows", TWO, **of_model), "cold", TOKENS)
    for reader in (ONE, FOUR):
        assert ask(joint(start, "windows", reader, **of_model), "warm", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize(("divided", "other"), [*pairwise([*DIVIDED, DIVIDED[0]]), (DIVIDED[0], None)], ids=str)
def test_states_ordered_otherwise_or_of_another_data_type_are_others(
    divided: DividedStates, other: DividedStates | None, start: StartEngine
) -> None:
    ask(joint(start, "states-0", TWO, divided=divided), "cold", TOKENS)
    other = other or replace(divided, item="torch.int8")
    assert ask(joint(start, "states-0", TWO, divided=other), "other", TOKENS).offers == [0]


@pytest.mark.parametrize(
    ("model", "writer", "reader", "budget"),
    [
        *(("plain", size, size, 4096) for size in (TWO, EIGHT, STAGES[1])),
        *(("windows", FOUR, TWO, budget) for budget in (BLOCK - 1, 3 * CHUNK + 1)),
        *(("states-0", FOUR, EIGHT, budget) for budget in (7, 3 * CHUNK + 1)),
        *(("windows", HYBRID_STAGES[1], TWO, budget) for budget in (7, 3 * CHUNK + 1)),
        slow("windows", FOUR, TWO, 7),
        slow("states-0", FOUR, EIGHT, BLOCK),
    ],
    ids=str,
)
def test_prompts_in_pieces_are_stored_by_ranks_and_stages_and_loaded_by_others(
    model: str, writer: Size, reader: Size, budget: int, start: StartEngine
) -> None:
    for size in (writer, reader):
        engine = joint(start, model, size, budget=budget, blocks=200)
        requests = [
            Request(f"r{number}", prompt(number, 4 * CHUNK + number), new_tokens=3) for number in range(1, 1 + REQUESTS)
        ]
        engine.run(*requests)
    assert [request.offers for request in requests] == [[4 * CHUNK]] * REQUESTS


@pytest.mark.parametrize(
    ("model", "reader", "row"),
    [
        *(("windows", TWO, row) for row in (0, WHOLE, WHOLE + RUN)),
        # Leased are the sections of the first group of states, the full chunks, then those of the second.
        *(("states-0", TWO, row) for row in (0, 2, SECTIONS + WHOLE + 2)),
        *(slow("states-0", TWO, row) for row in (1, SECTIONS + WHOLE, SECTIONS + WHOLE + 1)),
        ("windows", HYBRID_STAGES[0], 0),
    ],
    ids=str,
)
def test_a_flipped_bit_fails_the_load_of_all_ranks(model: str, reader: Size, row: int, start: StartEngine) -> None:
    ask(joint(start, model, ONE), "cold", TOKENS)
    engine = joint(start, model, reader)
    ask(engine, "begins", prompt(2, 3))
    flip_at_the_next_load(engine, row)
    assert ask(engine, "spoilt", TOKENS).offers == [WHOLE * CHUNK, 0]
    assert engine.recomputed == 1
    assert ask(joint(start, model, FOUR), "again", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize("model", ["plain", "windows"])
def test_engines_without_head_groups_share_with_their_own_size_alone(model: str, start: StartEngine) -> None:
    ask(joint(start, model, TWO), "cold", TOKENS)
    assert ask(joint(start, model, TWO, kvpool__head_groups=0), "apart", TOKENS).offers == [0]
    assert ask(joint(start, model, TWO, kvpool__head_groups=2), "fewer groups", TOKENS).offers == [0]
    assert ask(joint(start, model, TWO, kvpool__head_groups=0), "apart again", TOKENS).offers == [WHOLE * CHUNK]


@pytest.mark.parametrize(
    "model",
    [
        # The scheduler does not see how many heads the second layer of a group has.
        {"is_odd": True},
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
    two, four = ({"heads": heads, "kvpool__head_groups": heads, "layers": (), **model} for heads in (2, 4))
    ask(joint(start, "windows", TWO, **two), "cold", TOKENS)
    assert ask(joint(start, "windows", TWO, **two), "of the same size", TOKENS).offers == [WHOLE * CHUNK]
    assert ask(joint(start, "windows", FOUR, **four), "of another size", TOKENS).offers == [0]


def test_more_groups_than_heads_are_a_group_for_each_head(start: StartEngine) -> None:
    """As of a model whose other layers have more heads."""
    ask(joint(start, "plain", TWO), "cold", TOKENS)
    assert ask(joint(start, "plain", FOUR, kvpool__head_groups=2 * HEADS), "of eight groups", TOKENS).offers == [
        WHOLE * CHUNK
    ]


@pytest.mark.parametrize(
    ("model", "size", "groups", "count"),
    [
        *(("plain", size, groups, "4 KV heads") for size, groups in ((TWO, 3), (TWO, 1), (FOUR, 2), (ONE, 6))),
        *(("windows", size, groups, "4 KV heads") for size, groups in ((TWO, 3), (TWO, 1), (FOUR, 2))),
        *(("states-0", size, groups, "") for size, groups in ((EIGHT, 4), (TWO, 5))),
    ],
    ids=str,
)
def test_head_groups_that_ranks_heads_or_states_cannot_be_divided_for_are_refused(
    model: str, size: Size, groups: int, count: str, start: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = joint(start, model, size, kvpool__head_groups=groups)
    assert ask(engine, "cold", TOKENS).offers == [0]
    assert f"kvpool.head_groups is {groups}, expected a divisor of {count}" in caplog.text


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
    engine = joint(start, "windows", HYBRID_STAGES[0], **options)
    assert [ask(engine, name, TOKENS).offers for name in ("cold", "again")] == [[0], [0]]
    assert why in caplog.text


def test_a_vllm_without_a_handshake_by_stage_is_refused(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake_vllm.KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware")
    engine = joint(start, "windows", HYBRID_STAGES[0])
    assert [ask(engine, name, TOKENS).offers for name in ("cold", "again")] == [[0], [0]]
    assert "have no set_xfer_handshake_metadata_pp_aware" in caplog.text


def test_a_start_that_fails_with_all_stages_known_is_a_miss(
    start: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a way that no engine was seen to fail in: it is in the middle of its first step."""
    from kvpool_client.vllm import connector

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise TypeError("nobody knows why")

    monkeypatch.setattr(connector, "geometry_of", fail)
    engine = joint(start, "windows", HYBRID_STAGES[0])
    assert [ask(engine, name, TOKENS).offers for name in ("cold", "again")] == [[0], [0]]
    assert "a late start failed" in caplog.text


def test_the_layout_in_which_a_heads_bytes_are_in_a_row_is_asked_for() -> None:
    from kvpool_client.vllm.connector import ConnectorCalls

    ask_for = ConnectorCalls.get_required_kvcache_layout
    assert ask_for(config_of("/x", kvpool__head_groups=4)) == "LBHNC"
    assert ask_for(config_of("/x")) is None
