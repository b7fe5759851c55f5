"""Sparse sequences over a real daemon: exact where they say so, bounded, shared, and never wrong when the pool loses
something."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_sparse import SequenceLost, SparseConfig, SparseSequence
from tests.rigs.daemon import Daemon, Start, in_both_write_modes, wait_until
from tests.rigs.sparse_text import (
    CONFIG,
    DENSE,
    EVERYTHING,
    HEADS,
    LAYOUT,
    NOTHING,
    Text,
    bits_equal,
    due_chunks,
    end_connection_of,
    floats_of,
    lose_lease,
    sequence_of,
)

if TYPE_CHECKING:
    from kvpool_sparse.device import DeviceSequence  # imports torch


@pytest.fixture
def pool(module_daemon: Daemon) -> Iterator[kv.Pool]:
    """On the module's daemon: the texts of its tests differ."""
    with module_daemon.connect(layout=LAYOUT) as connected:
        yield connected


def test_below_the_dense_boundary_attention_is_full(pool: kv.Pool) -> None:
    text = Text(1, 300)
    with sequence_of(pool, text, CONFIG, 255) as sequence:
        for layer in range(LAYOUT.layers):
            np.testing.assert_allclose(sequence.attend(layer, text.query), text.exact(layer, 255), atol=2e-5)
            found = sequence.recall(layer, text.query)
            assert found.tail is None
            assert found.blocks.tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("end", "write_mode"),
    [(300, "in-place"), (511, "in-place"), (900, "in-place"), (1501, "copy")],
    indirect=["write_mode"],
)
def test_a_budget_of_everything_has_the_bits_of_full_attention(pool: kv.Pool, end: int) -> None:
    text = Text(2, end)
    with sequence_of(pool, text, EVERYTHING, end) as sparse, sequence_of(pool, text, DENSE, end) as dense:
        for layer in range(LAYOUT.layers):
            one, other = sparse.attend(layer, text.query), dense.attend(layer, text.query)
            assert bits_equal(one, other)
            np.testing.assert_allclose(one, text.exact(layer, end), atol=2e-5)


def test_own_memory_is_bounded_whatever_the_length(pool: kv.Pool) -> None:
    text = Text(4, 2500)
    pages = -(-CONFIG.local_tokens // LAYOUT.chunk_tokens) + 2  # one that fills, one that the window cuts
    with SparseSequence(pool, CONFIG, threads=1) as sequence:
        for end in range(700, 2501, 300):
            text.append_to(sequence, end, step=64)
            assert sequence.settle() == due_chunks(end)
            assert sequence.own_bytes <= pages * LAYOUT.chunk_bytes * 1.5  # with summaries, here a third of the KV
        attended = [sequence.attend(layer, text.query) for layer in range(LAYOUT.layers)]
    with SparseSequence(pool, replace(CONFIG, offload_boundary=1 << 20), threads=1) as whole:
        text.append_to(whole, 2500)
        for layer in range(LAYOUT.layers):
            assert bits_equal(attended[layer], whole.attend(layer, text.query))


@in_both_write_modes
def test_another_sequence_with_the_prefix_builds_no_summary(pool: kv.Pool, module_daemon: Daemon) -> None:
    text = Text(5, 1400)
    with sequence_of(pool, text, CONFIG, 1300, is_shared=True) as first:
        assert first.settle() == due_chunks(1300)
        expected = [first.attend(layer, text.query) for layer in range(LAYOUT.layers)]
        end = first.tokens
    with (
        module_daemon.connect(layout=LAYOUT) as other,
        SparseSequence(other, CONFIG, tokens=text.ids[:end], threads=2) as second,
    ):
        assert second.prefix_tokens >= 18 * 64
        assert second.stats()["summaries_built"] == 0
        before = second.tokens
        text.append_to(second, end)
        left = CONFIG.middle_blocks(end) - CONFIG.middle_blocks(before)
        assert second.stats()["summaries_built"] <= left * LAYOUT.layers
        for layer in range(LAYOUT.layers):
            assert bits_equal(second.attend(layer, text.query), expected[layer])


def test_a_prompt_that_is_appended_whole_behind_its_prefix_is_refused(module_daemon: Daemon) -> None:
    """Its KV would be stored under the keys of later tokens."""
    text = Text(77, 20 * 64)
    with module_daemon.connect(LAYOUT) as pool:
        with SparseSequence(pool, CONFIG, tokens=text.ids) as first:
            text.append_to(first, len(text.ids))
            stored = first.settle()
        with SparseSequence(pool, CONFIG, tokens=text.ids) as second:
            assert second.prefix_tokens == stored * 64 > 0
            prefix = second.prefix_tokens
            whole = rf"k has 1280 tokens, expected those behind the first {prefix} of 1280"
            with pytest.raises(kv.InvalidArgument, match=whole):
                second.append(0, text.keys[0], text.values[0])
            # Layer by layer, with attention between them: what is approximate from here on is no mistake.
            for layer in range(LAYOUT.layers):
                second.append(layer, text.keys[layer, prefix:], text.values[layer, prefix:])
                second.attend(layer, text.query)
            assert second.tokens == len(text.ids)


def test_a_sequence_of_its_own_is_found_by_nobody(pool: kv.Pool) -> None:
    text = Text(6, 900)
    with sequence_of(pool, text, CONFIG, 900) as sequence:
        assert sequence.stats()["chunks_in_arena"] > 0
        assert pool.lookup(pool.keys(text.ids)).chunks == 0
        with pytest.raises(kv.InvalidArgument, match="without tokens"):
            sequence.extend([1])


@pytest.mark.parametrize(
    ("tokens", "cure"),
    [([[1, 2, 3]], r"tokens\[0\]"), (np.ones((1, 700), np.int64), r"tokens\[0\]"), ([1.5, 2.5], "integers")],
)
def test_tokens_of_a_batch_are_refused_as_for_keys(pool: kv.Pool, tokens: object, cure: str) -> None:
    with pytest.raises(kv.InvalidArgument, match=f"tokens have shape .*{cure}$"):
        SparseSequence(pool, CONFIG, tokens=tokens)
    sequence = SparseSequence(pool, CONFIG, tokens=[1, 2, 3])
    with sequence, pytest.raises(kv.InvalidArgument, match=f"tokens have shape .*{cure}$"):
        sequence.extend(tokens)


def decode(sequence: "SparseSequence | DeviceSequence", text: Text, end: int) -> None:
    """Append tokens one by one as a model does: each layer attends before the next one has the token's KV."""
    for token in range(sequence.tokens, end):
        sequence.extend(text.ids[token : token + 1])
        for layer in range(LAYOUT.layers):
            sequence.append(layer, text.keys[layer, token : token + 1], text.values[layer, token : token + 1])
            sequence.attend(layer, text.query)


@pytest.mark.parametrize(
    ("config", "exact_tokens"),
    [
        (CONFIG, 600),
        (replace(CONFIG, local_tokens=0), 600),
        (replace(CONFIG, dense_boundary=700, offload_boundary=700), 699),
        (EVERYTHING, 900),
    ],
)
def test_what_was_computed_from_an_estimate_is_found_by_nobody(
    pool: kv.Pool, module_daemon: Daemon, config: SparseConfig, exact_tokens: int
) -> None:
    """The token of the first estimated step is approximate in later layers, and so is all behind it."""
    seed = 33 + exact_tokens + config.local_tokens
    text = Text(seed, 1000)
    with sequence_of(pool, text, config, 600, is_shared=True) as sequence:
        decode(sequence, text, 900)
        due = (config.init_tokens + 64 * config.middle_blocks(900)) // LAYOUT.chunk_tokens
        assert sequence.settle() == due
        found = min(exact_tokens // LAYOUT.chunk_tokens, due)
        assert pool.lookup(pool.keys(text.ids)).chunks == found
        with sequence.fork() as fork:
            decode(fork, text, 1000)
            in_fork = fork.settle()
            assert in_fork > due
        end_connection_of(pool)
        wait_until(lambda: pool.connected, "the pool has connected again")
        np.testing.assert_array_equal(np.asarray(sequence.dense(1)[0]), text.keys[1, :900].transpose(1, 0, 2))
        assert pool.lookup(pool.keys(text.ids)).chunks == (in_fork if config is EVERYTHING else found)


def test_a_prefix_stays_found_when_its_last_token_is_asked_about(pool: kv.Pool) -> None:
    text = Text(34, 900)
    with sequence_of(pool, text, EVERYTHING, 900, is_shared=True) as first:
        chunks = first.settle()
    with SparseSequence(pool, replace(CONFIG, local_tokens=0), tokens=text.ids, threads=1) as second:
        assert second.prefix_tokens == chunks * LAYOUT.chunk_tokens
        second.attend(0, text.query)
        end_connection_of(pool)
        wait_until(lambda: pool.connected, "the pool has connected again")
        second.attend(0, text.query)
        assert second.stats()["reattached"] == 1


@pytest.mark.parametrize("config", [CONFIG, NOTHING, EVERYTHING])
def test_a_query_of_zeros_estimates_the_count_and_the_mean(pool: kv.Pool, config: SparseConfig) -> None:
    text, end = Text(7, 800), 777
    with sequence_of(pool, text, config, end) as sequence:
        found = sequence.recall(1, np.zeros((HEADS, LAYOUT.head_dim), np.float32))
        blocks = config.middle_blocks(end)
        assert found.blocks.shape == (LAYOUT.kv_heads, config.blocks_to_take(blocks))
        assert found.tail is not None
        left = blocks - found.blocks.shape[1]
        if not left:
            assert np.isneginf(found.tail[0]).all()
            return
        np.testing.assert_allclose(found.tail[0], np.log(left * 64), rtol=1e-5)
        values = floats_of(text.values[1])
        for head in range(HEADS):
            group = head // (HEADS // LAYOUT.kv_heads)
            rest = [number for number in range(blocks) if number not in found.blocks[group]]
            tokens = np.concatenate([np.arange(64 + 64 * number, 128 + 64 * number) for number in rest])
            np.testing.assert_allclose(found.tail[1][head], values[tokens, group].mean(axis=0), atol=0.05)


def test_blocks_that_are_not_there_are_not_fetched(pool: kv.Pool) -> None:
    text, end = Text(8, 1200), 1200
    with sequence_of(pool, text, CONFIG, end) as sequence:
        with pytest.raises(kv.InvalidArgument, match="blocks reach"):
            sequence.fetch(0, np.full((2, 1), CONFIG.middle_blocks(end)))
        none, _ = sequence.fetch(0, np.empty((2, 0), np.int64))
        assert np.asarray(none).shape == (2, 0, LAYOUT.head_dim)


@pytest.mark.parametrize("layout_summaries", ["clusters7", ""])
@pytest.mark.parametrize("local_tokens", [0, 32, 500])
def test_a_fork_attends_by_its_own_settings(module_daemon: Daemon, layout_summaries: str, local_tokens: int) -> None:
    text, settings = Text(31, 1900), replace(CONFIG, local_tokens=local_tokens, topk_share=0.5, dense_boundary=128)
    layout = replace(LAYOUT, summaries=layout_summaries)
    with (
        module_daemon.connect(layout=layout) as pool,
        sequence_of(pool, text, CONFIG, 1300) as parent,
        sequence_of(pool, text, settings, 1300) as other,
    ):
        assert parent.settle() > 2
        before = parent.attend(0, text.query)
        with parent.fork(settings) as fork:
            assert (fork.config, parent.config) == (settings, CONFIG)
            for end in (1300, 1900):
                for each in (fork, other):
                    text.append_to(each, end)
                    each.settle()
                for layer in range(LAYOUT.layers):
                    found, expected = (each.recall(layer, text.query) for each in (fork, other))
                    assert np.array_equal(found.blocks, expected.blocks)
                    assert bits_equal(fork.attend(layer, text.query), other.attend(layer, text.query))
        assert bits_equal(parent.attend(0, text.query), before)


def test_settings_are_not_assigned_and_those_of_other_blocks_are_refused(pool: kv.Pool) -> None:
    text = Text(32, 600)
    with sequence_of(pool, text, CONFIG, 600) as sequence:
        for name, value in (("config", EVERYTHING), ("layout", LAYOUT)):
            with pytest.raises(AttributeError, match=rf"'{name}'.*no setter"):
                setattr(sequence, name, value)
        with pytest.raises(kv.InvalidArgument, match="init_tokens is 128, expected that of the sequence to fork, 64"):
            sequence.fork(replace(CONFIG, init_tokens=128))
        with pytest.raises(kv.InvalidArgument, match="block_tokens is 32, expected that of the sequence to fork, 64"):
            sequence.fork(replace(CONFIG, block_tokens=32))
        with pytest.raises(kv.InvalidArgument, match="config is dict, expected a SparseConfig"):
            sequence.fork({})  # type: ignore[arg-type]
        assert sequence.fork().config is CONFIG


def test_a_closed_sequence_raises_and_closes_again(pool: kv.Pool, module_daemon: Daemon) -> None:
    text = Text(11, 900)
    with sequence_of(pool, text, CONFIG, 900) as sequence:
        pass
    sequence.close()
    with pytest.raises(kv.KVPoolError, match="closed"):
        sequence.attend(0, text.query)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "its lease has ended")


def test_a_killed_daemon_loses_nothing_of_a_sequence(daemon: Daemon) -> None:
    text = Text(12, 2000)
    with daemon.connect(layout=LAYOUT) as pool, sequence_of(pool, text, EVERYTHING, 1300) as sequence:
        daemon.kill()
        text.append_to(sequence, 1400)
        np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 1400), atol=2e-5)
        daemon.start()
        wait_until(lambda: pool.connected, "the pool has connected again")
        text.append_to(sequence, 2000)
        for layer in range(LAYOUT.layers):
            np.testing.assert_allclose(sequence.attend(layer, text.query), text.exact(layer, 2000), atol=2e-5)
        assert sequence.settle() == due_chunks(2000)  # saved again, out of the former daemon's memory
        assert pool.lookup(sequence._offload.source.keys).chunks >= due_chunks(2000)
        np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 2000), atol=2e-5)


def test_chunks_that_are_gone_are_an_error_and_never_wrong(pool: kv.Pool, module_daemon: Daemon) -> None:
    text = Text(13, 1300)
    with sequence_of(pool, text, EVERYTHING, 1300) as sequence, module_daemon.admin() as admin:
        assert sequence.stats()["chunks_in_arena"] > 0
        sequence.attend(0, text.query)
        lose_lease(module_daemon, pool)
        admin.flush(None, None)
        with pytest.raises(SequenceLost, match="first 0 tokens"):
            sequence.attend(0, text.query)
        with pytest.raises(kv.KVPoolError, match="closed"):
            sequence.attend(0, text.query)


CALLS: dict[str, Callable[[SparseSequence, Text], object]] = {
    "attend": lambda sequence, text: sequence.attend(1, text.query),
    "append": lambda sequence, text: sequence.append(0, text.keys[0, :0], text.values[0, :0]),
    "settle": lambda sequence, text: sequence.settle(),
    "fork": lambda sequence, text: sequence.fork().close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_connection_alone_is_mended_by_the_next_call(pool: kv.Pool, module_daemon: Daemon, call: str) -> None:
    text = Text(14, 1300)
    with sequence_of(pool, text, EVERYTHING, 1300) as sequence:
        chunks = sequence.settle()
        lose_lease(module_daemon, pool)
        CALLS[call](sequence, text)
        assert module_daemon.stats()["leases"] == 1
        np.testing.assert_allclose(sequence.attend(1, text.query), text.exact(1, 1300), atol=2e-5)
        assert sequence.stats()["reattached"] == 1
        assert sequence.stats()["chunks_in_arena"] == chunks


def test_what_cannot_be_leased_again_is_lost_though_nobody_has_evicted_it(
    pool: kv.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(29, 1300)
    with sequence_of(pool, text, EVERYTHING, 1300) as sequence:
        assert sequence.settle() > 2
        end_connection_of(pool)
        wait_until(lambda: pool.connected, "the pool has connected again")
        lookup = kv.Pool.lookup
        monkeypatch.setattr(kv.Pool, "lookup", lambda self, keys: replace(lookup(self, keys), chunks=2))
        with pytest.raises(SequenceLost, match="first 128 tokens"):
            sequence.attend(0, text.query)


def test_a_new_daemon_without_the_chunks_is_asked_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    text, asked = Text(30, 1300), []
    with daemon.connect(layout=LAYOUT) as pool, sequence_of(pool, text, EVERYTHING, 1300) as sequence:
        assert sequence.settle() > 2
        daemon.kill()
        daemon.start()
        wait_until(lambda: pool.connected, "the pool has connected again")
        lookup = kv.Pool.lookup

        def counted(self: kv.Pool, keys: kv.KeyChain) -> kv.Hit:
            asked.append(1)
            return lookup(self, keys)

        monkeypatch.setattr(kv.Pool, "lookup", counted)
        for _ in range(3):
            np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 1300), atol=2e-5)
        assert len(asked) == 1
        assert sequence.stats()["reattached"] == 0


def test_damaged_summaries_are_built_again(pool: kv.Pool, module_daemon: Daemon) -> None:
    text = Text(15, 1400)
    with sequence_of(pool, text, CONFIG, 1300, is_shared=True) as first:
        assert first.settle() == due_chunks(1300)
        end = first.tokens
        expected = first.attend(0, text.query)
    with pool.leased_memory(pool.acquire(pool.lookup(pool.keys(text.ids[:end])))) as memory:
        session = memory.lease.session
        assert session is not None
        session.arena.view()[int(memory.lease.rows.offsets[3]) + LAYOUT.chunk_bytes + 40] ^= 0x55
    with SparseSequence(pool, CONFIG, tokens=text.ids[:end], threads=2) as second:
        assert second.prefix_tokens >= 18 * 64
        assert second.stats()["summaries_built"] == LAYOUT.layers
        text.append_to(second, end)
        assert bits_equal(second.attend(0, text.query), expected)
    assert len(module_daemon.problems()) == 1, "a deep check finds and drops it"


def test_without_a_daemon_everything_stays_and_is_right(start_daemon: Start) -> None:
    daemon = start_daemon()
    text = Text(16, 1100)
    with daemon.connect(layout=LAYOUT) as pool:
        daemon.kill()
        wait_until(lambda: not pool.connected, "the pool has noticed")
        with sequence_of(pool, text, EVERYTHING, 1100) as sequence:
            assert sequence.stats()["chunks_in_arena"] == 0
            np.testing.assert_allclose(sequence.attend(0, text.query), text.exact(0, 1100), atol=2e-5)


def test_a_full_pool_leaves_pages_where_they_are(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity="256KiB", dram__segment="64KiB")
    text = Text(17, 2500)
    with daemon.connect(layout=LAYOUT) as pool, sequence_of(pool, text, EVERYTHING, 2500) as sequence:
        assert sequence.stats()["chunks_in_arena"] < 20
        for layer in range(LAYOUT.layers):
            np.testing.assert_allclose(sequence.attend(layer, text.query), text.exact(layer, 2500), atol=2e-5)


def test_nan_keys_are_always_read(pool: kv.Pool) -> None:
    text = Text(18, 1000)
    text.keys[0, 500, 0, 5] = 0x7FC0
    with sequence_of(pool, text, NOTHING, 1000) as sequence:
        found = sequence.recall(0, text.query)
        assert found.is_dense[0]
        assert not found.is_dense[1]
        assert np.isnan(sequence.attend(0, text.query)[:3]).all()
        assert np.isfinite(sequence.attend(0, text.query)[3:]).all()
