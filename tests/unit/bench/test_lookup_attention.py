"""Choices of `bench sparse`, and the calls that it times: whole, of the sizes that its rows state, of the right bits."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool_tools.bench.lookup_attention.choice import Sizes, parse_configs, parse_threads, parse_tokens
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence
from kvpool_tools.bench.lookup_attention.steps import check_memory

SIZES = Sizes(tokens=2048, heads=4, kv_heads=2, head_dim=32, layers=2)


@pytest.fixture
def sequence(tmp_path: Path) -> Iterator[MeasuredSequence]:
    with kv.connect(str(tmp_path / "none.sock"), model="bench", layout=SIZES.layout) as pool:
        made = MeasuredSequence(pool, SIZES)
        assert sum(1 for _ in made.fill()) == made.pages
        for number in range(made.pages):
            made.summarise_page(number)
        yield made
        made.close()


@pytest.mark.parametrize(("text", "tokens"), [("131072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1 << 20)])
def test_tokens_are_written_as_numbers_or_with_a_unit(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "1.5k", "128KiB", "-1"])
def test_other_tokens_are_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("resident", "budgets", "words"),
    [
        ("1024", "5", "expected INIT"),
        ("128+1024", "five", "expected percentages"),
        ("128+1024", "0", "expected percentages"),
        ("128+1024", "101", "expected percentages"),
        ("128+1024", "nan", "expected percentages"),
        ("1024+7192", "5", "nothing to look up of 4096 tokens"),
        ("100+1024", "5", "multiple of block_tokens"),
    ],
)
def test_other_configurations_are_refused_in_words(resident: str, budgets: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_configs(resident, budgets, 4096)


def test_threads_are_those_named_or_one_and_two() -> None:
    assert parse_threads("1,3") == (1, 3)
    assert parse_threads(None) == ((1, 2) if len(os.sched_getaffinity(0)) > 1 else (1,))
    for text in ("", "0", "1,two"):
        with pytest.raises(InvalidArgument, match="--threads is"):
            parse_threads(text)


def test_sizes_that_do_not_agree_or_fit_are_refused_in_words() -> None:
    with pytest.raises(InvalidArgument, match="--tokens is 100"):
        Sizes(tokens=100, heads=4, kv_heads=2, head_dim=32, layers=1)
    with pytest.raises(InvalidArgument, match="--heads is 3"):
        Sizes(tokens=256, heads=3, kv_heads=2, head_dim=32, layers=1)
    with pytest.raises(InvalidArgument, match="take fewer by --layers or --tokens"):
        check_memory(Sizes(tokens=1 << 30, heads=32, kv_heads=8, head_dim=128, layers=80))


def test_a_step_of_everything_has_the_bits_of_full_attention(sequence: MeasuredSequence) -> None:
    (everything,) = parse_configs("128+256", "100", SIZES.tokens)
    sequence.become(everything, 1)
    query = sequence.query()
    assert sequence.attended_bytes() == SIZES.layer_kv_bytes
    for layer in range(SIZES.layers):
        assert np.array_equal(sequence.attend(layer, query), sequence.dense_attention(layer, query))


def test_a_step_attends_to_as_many_bytes_as_its_row_states(sequence: MeasuredSequence) -> None:
    (config,) = parse_configs("128+256", "20", SIZES.tokens)
    sequence.become(config, 2)
    assert sequence.threads == 2
    blocks, taken = config.middle_blocks(SIZES.tokens), config.blocks_to_take(config.middle_blocks(SIZES.tokens))
    assert (blocks, taken) == (13, 3)
    assert sequence.attended_bytes() == (2048 - 10 * 128) * 2 * 2 * 32 * 2
    assert sequence.summary_bytes() == 13 * 2 * kvpool_native.summary_bytes("clusters7", 32)
    query = sequence.query()
    for timed in (
        sequence.timed_read(0),
        sequence.timed_dense(0, query),
        sequence.timed_recall(0, query),
        sequence.timed_choice(0, query),
        sequence.timed_sparse(0, query),
        sequence.timed_step(0, query),
        sequence.read_page(0),
    ):
        assert timed[0] > 0
    assert sequence.tally.recalls == 3
    assert sequence.tally.summaries_built == 0
