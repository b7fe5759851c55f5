"""Sequences that attend on a device: what the host computes, with a bounded part of the KV there.

Here the device is the processor, where staging is forced; tests marked `gpu` run the same on CUDA.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kvpool_client as kv
from kvpool_sparse import SparseConfig, SparseSequence
from kvpool_sparse.device import DeviceSequence
from kvpool_sparse.device.prefetch import THREAD_NAME
from kvpool_sparse.results import Floats
from tests.e2e.sparse.test_reports import measured, wait_for
from tests.rigs.daemon import Daemon
from tests.rigs.sparse_text import CONFIG, DENSE, EVERYTHING, HEADS, LAYOUT, NOTHING, Text, bits_of

__all__ = ["measured"]  # fixtures

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Against the host's kernels: both accumulate in float32, in other orders.
CLOSE = 2e-5
PLENTY = 400
Items = npt.NDArray[np.generic]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    found = torch.device(request.param)
    if found.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    return found


@pytest.fixture
def pool(device: torch.device, request: pytest.FixtureRequest) -> Iterator[kv.Pool]:
    """Started only where there is such a device."""
    daemon: Daemon = request.getfixturevalue("module_daemon")
    with daemon.connect(layout=LAYOUT) as connected:
        yield connected


@contextlib.contextmanager
def both_of(
    pool: kv.Pool, text: Text, config: SparseConfig, end: int, *, device: torch.device, staging_blocks: int = PLENTY
) -> Iterator[tuple[SparseSequence, DeviceSequence]]:
    """The same tokens in a sequence of the host and in one of the device."""
    with (
        SparseSequence(pool, config, threads=1) as host,
        DeviceSequence(SparseSequence(pool, config, threads=1), device=device, staging_blocks=staging_blocks) as there,
    ):
        text.append_to(host, end)
        append_to(there, text, end)
        yield host, there


def append_to(sequence: DeviceSequence, text: Text, end: int, step: int = 100) -> None:
    """As `Text.append_to`, as tensors of the sequence's device."""
    for first in range(sequence.tokens, end, step):
        rows = slice(first, min(end, first + step))
        for layer in range(LAYOUT.layers):
            keys, values = (tensor_of(part[layer, rows]).to(sequence.device) for part in (text.keys, text.values))
            sequence.append(layer, keys, values)


def tensor_of(bits: Items) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(np.int16)).view(torch.bfloat16)


def attended(sequence: DeviceSequence, layer: int, query: Floats) -> Floats:
    """A step whose query is on the device."""
    out = sequence.attend(layer, torch.from_numpy(query).to(sequence.device))
    assert out.dtype == torch.float32
    assert out.device == sequence.device
    return np.asarray(out.cpu().numpy())


def check_same(host: SparseSequence, there: DeviceSequence, query: Floats) -> None:
    for layer in range(LAYOUT.layers):
        np.testing.assert_allclose(
            attended(there, layer, query), host.attend(layer, query), atol=CLOSE, err_msg=f"layer {layer}"
        )
        there._ready()  # a prefetch may be under way
        there._staging.table.verify()


def queries(seed: int, count: int) -> list[Floats]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((HEADS, LAYOUT.head_dim), np.float32) * np.float32(2) for _ in range(count)]


def prefetch_threads() -> int:
    return sum(thread.name.startswith(THREAD_NAME) for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("config", "first"),
    [
        pytest.param(CONFIG, 30, id="some-30"),
        pytest.param(NOTHING, 700, id="nothing-700"),
        pytest.param(EVERYTHING, 700, id="everything-700"),
        pytest.param(DENSE, 30, id="dense-30"),
        pytest.param(CONFIG, 700, id="some-700", marks=pytest.mark.slow),
        pytest.param(NOTHING, 30, id="nothing-30", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, 30, id="everything-30", marks=pytest.mark.slow),
        pytest.param(DENSE, 700, id="dense-700", marks=pytest.mark.slow),
    ],
)
def test_a_device_attends_as_the_host_does(
    pool: kv.Pool, config: SparseConfig, first: int, device: torch.device
) -> None:
    text = Text(30, 1501)
    with both_of(pool, text, config, first, device=device) as (host, there):
        for end in (64, 150, 160, 161, 255, 256, 701, 702, 1100, 1501):
            text.append_to(host, end, step=90)
            append_to(there, text, end)
            for query in queries(end, 2):
                check_same(host, there, query)
            if config in (EVERYTHING, DENSE):
                np.testing.assert_allclose(attended(there, 1, text.query), text.exact(1, there.tokens), atol=2e-5)


@pytest.mark.parametrize(
    "staging_blocks", [2, 9, *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in (3, 40))]
)
def test_a_step_that_wants_more_than_there_is_room_for_goes_in_pieces(
    pool: kv.Pool, device: torch.device, staging_blocks: int
) -> None:
    text, end = Text(31, 1500), 1500
    with both_of(pool, text, EVERYTHING, end, device=device, staging_blocks=staging_blocks) as (host, there):
        before = there.device_bytes
        for query in queries(31, 3):
            check_same(host, there, query)
        blocks = EVERYTHING.middle_blocks(end) * LAYOUT.kv_heads
        assert there.stats()["staging_wanted"] == 3 * LAYOUT.layers * blocks
        assert there._staging.table.used <= there._staging.table.slots < staging_blocks
        assert there.device_bytes == before


def test_memory_on_the_device_is_bounded_whatever_the_length(pool: kv.Pool, device: torch.device) -> None:
    text = Text(33, 2500)
    token = LAYOUT.layers * LAYOUT.token_plane_bytes * 2
    block = CONFIG.block_tokens * LAYOUT.head_dim * 2 * 2
    most = (CONFIG.init_tokens + CONFIG.local_tokens + CONFIG.block_tokens) * token + 24 * block
    with DeviceSequence(SparseSequence(pool, CONFIG, threads=1), device=device, staging_blocks=24) as there:
        for end in (50, 400, 1200, 2500):
            append_to(there, text, end)
            for query in queries(end, 2):
                np.testing.assert_allclose(attended(there, 0, query), there.sequence.attend(0, query), atol=CLOSE)
            assert there.device_bytes == there.stats()["device_bytes"] == most
    assert there.device_bytes == 0


def test_a_repeated_query_fetches_nothing_and_counts_its_overlap(pool: kv.Pool, device: torch.device) -> None:
    text, end = Text(34, 1300), 1300
    with both_of(pool, text, CONFIG, end, device=device) as (_, there):
        take = CONFIG.blocks_to_take(CONFIG.middle_blocks(end)) * LAYOUT.kv_heads
        attended(there, 0, text.query)
        first = there.stats()
        assert (first["staging_wanted"], first["staging_hits"], first["staging_copies"]) == (take, 0, take)
        assert (first["overlap"], first["staging_hit_rate"]) == (1.0, 0.0)
        attended(there, 0, text.query)
        second = there.stats()
        assert (second["staging_wanted"], second["staging_hits"], second["staging_copies"]) == (2 * take, take, take)
        assert (second["compared_blocks"], second["repeated_blocks"]) == (take, take)
        last = there._reader.wanted(0, there.recall(0, text.query))
        other = queries(34, 1)[0]
        attended(there, 0, other)
        now = there._reader.wanted(0, there.recall(0, other))
        third = there.stats()
        assert third["compared_blocks"] == 2 * take
        assert third["repeated_blocks"] == take + np.count_nonzero(last & now)
        assert third["overlap"] == third["repeated_blocks"] / (2 * take)


def test_the_next_layers_blocks_are_there_before_its_step(pool: kv.Pool, device: torch.device) -> None:
    text, end = Text(35, 1300), 1300
    with both_of(pool, text, CONFIG, end, device=device) as (host, there):
        take = CONFIG.blocks_to_take(CONFIG.middle_blocks(end)) * LAYOUT.kv_heads
        check_same(host, there, text.query)
        there._ready()
        there._staging.table.clear()
        attended(there, 0, text.query)  # behind it the blocks of layer 1 are staged
        before = there.stats()
        assert before["staging_prefetch_hits"] == 0
        attended(there, 1, text.query)
        after = there.stats()
        assert after["staging_hits"] - before["staging_hits"] == take
        assert after["staging_prefetch_hits"] == take
        assert after["staging_copies"] == 4 * take
        check_same(host, there, text.query)
        assert there.stats()["staging_prefetch_hits"] == take, "counted once"


def test_fetched_blocks_are_what_was_appended(pool: kv.Pool, device: torch.device) -> None:
    text, end = Text(38, 1200), 1200
    with both_of(pool, text, CONFIG, end, device=device, staging_blocks=5) as (host, there):
        for blocks in (host.recall(0, text.query).blocks, np.array([[3, 3, 0], [7, 3, 7]]), np.empty((2, 0), np.int64)):
            keys, values = there.fetch(0, blocks)
            for found, expected in zip((keys, values), host.fetch(0, blocks), strict=True):
                bits = np.asarray(found.cpu().view(torch.int16).numpy()).view(np.uint16)
                assert np.array_equal(bits, np.asarray(expected))
        with pytest.raises(kv.InvalidArgument, match="blocks reach"):
            there.fetch(0, np.full((2, 1), CONFIG.middle_blocks(end)))


def test_all_tokens_come_to_the_device_for_prompts(pool: kv.Pool, device: torch.device) -> None:
    text = Text(39, 700)
    with both_of(pool, text, CONFIG, 700, device=device) as (_, there):
        keys, values = there.dense(1)
        for found, expected in ((keys, text.keys), (values, text.values)):
            assert found.device == there.device
            bits = np.asarray(found.cpu().view(torch.int16).numpy()).view(np.uint16)
            assert np.array_equal(bits, expected[1].transpose(1, 0, 2))


def test_a_sequence_is_taken_over_with_its_tokens(pool: kv.Pool, module_daemon: Daemon, device: torch.device) -> None:
    text, end = Text(40, 1400), 1300
    with SparseSequence(pool, CONFIG, tokens=text.ids[:end], threads=1) as first:
        text.append_to(first, end)
        first.settle()
        expected = [first.attend(layer, text.query) for layer in range(LAYOUT.layers)]
    with module_daemon.connect(layout=LAYOUT) as other:
        host = SparseSequence(other, CONFIG, tokens=text.ids[:end], threads=1)
        with DeviceSequence(host, device=device, staging_blocks=PLENTY) as second:
            assert second.prefix_tokens >= 18 * 64
            append_to(second, text, end)
            for layer in range(LAYOUT.layers):
                np.testing.assert_allclose(attended(second, layer, text.query), expected[layer], atol=CLOSE)


def test_what_was_computed_from_an_estimate_is_found_by_nobody(pool: kv.Pool, device: torch.device) -> None:
    text = Text(45, 900)
    host = SparseSequence(pool, CONFIG, tokens=text.ids[:600], threads=1)
    with DeviceSequence(host, device=device, staging_blocks=PLENTY) as there:
        append_to(there, text, 600)
        for token in range(600, 900):
            there.extend(text.ids[token : token + 1])
            append_to(there, text, token + 1)
            there.attend(0, text.query)
        assert there.settle() > 600 // LAYOUT.chunk_tokens
        assert pool.lookup(pool.keys(text.ids)).chunks == 600 // LAYOUT.chunk_tokens


@pytest.mark.parametrize("local_tokens", [0, 500])
def test_a_fork_attends_by_its_own_settings(pool: kv.Pool, device: torch.device, local_tokens: int) -> None:
    text, settings = Text(44, 1500), replace(CONFIG, local_tokens=local_tokens, topk_share=0.5)
    with both_of(pool, text, CONFIG, 1300, device=device) as (host, there):
        there.settle()
        with there.fork(settings) as child, host.fork(settings) as expected:
            assert (child.config, there.config) == (settings, CONFIG)
            for end in (1300, 1500):
                append_to(child, text, end)
                text.append_to(expected, end)
                check_same(expected, child, text.query)
        with pytest.raises(AttributeError, match=r"'config'.*no setter"):
            there.config = settings  # type: ignore[misc]  # what is refused


def test_a_closed_sequence_raises_and_leaves_no_thread(pool: kv.Pool, device: torch.device) -> None:
    text = Text(43, 900)
    before = prefetch_threads()
    with both_of(pool, text, CONFIG, 900, device=device) as (host, there):
        for _ in range(2):
            check_same(host, there, text.query)
        assert prefetch_threads() == before + 1
    assert prefetch_threads() == before
    there.close()
    for use in (
        lambda: there.attend(0, text.query),
        lambda: there.append(0, text.keys[0, :1], text.values[0, :1]),
        lambda: there.fetch(0, np.zeros((2, 1), np.int64)),
        there.fork,
        there.settle,
    ):
        with pytest.raises(kv.KVPoolError, match="closed"):
            use()
    assert "closed" in repr(there)
    assert there.stats()["staged_blocks"] == 0


def test_heads_that_cannot_be_estimated_are_read_whole(pool: kv.Pool, device: torch.device) -> None:
    text = Text(45, 1200)
    for pair, frequency in enumerate((1.0, 1.7, 2.3, 2.9)):  # constants in fast rotary pairs
        phases = np.arange(1200, dtype=np.float32) * np.float32(frequency)
        text.keys[:, :, 1, pair] = bits_of(np.cos(phases) * np.float32(40))
        text.keys[:, :, 1, pair + 16] = bits_of(np.sin(phases) * np.float32(40))
    text.query[3:, :4] = 1.5
    with both_of(pool, text, NOTHING, 1200, device=device, staging_blocks=20) as (host, there):
        assert host.recall(0, text.query).is_doubtful[1]
        check_same(host, there, text.query)
        assert there.stats()["dense_heads"] == host.stats()["dense_heads"] > 0


def test_what_cannot_be_is_refused(pool: kv.Pool, device: torch.device) -> None:
    text = Text(46, 200)
    for blocks in (1, 0, -5, True, 2.5):
        with SparseSequence(pool, CONFIG, threads=1) as host, pytest.raises(kv.InvalidArgument, match="staging_blocks"):
            DeviceSequence(host, device=device, staging_blocks=blocks)  # type: ignore[arg-type]  # on purpose
    with DeviceSequence(SparseSequence(pool, CONFIG, threads=1), device=device) as there:
        with pytest.raises(kv.InvalidArgument, match="has no tokens"):
            there.attend(0, text.query)
        with pytest.raises(kv.InvalidArgument, match="layer is 2"):
            there.append(2, text.keys[0], text.values[0])
        with pytest.raises(kv.InvalidArgument, match="expected the same"):
            there.append(0, text.keys[0], text.values[0, :5])
        with pytest.raises(kv.InvalidArgument, match="dtype"):
            there.append(0, torch.zeros(1, 2, 32), torch.zeros(1, 2, 32))
        assert there.tokens == 0
        there.append(0, text.keys[0], text.values[0])
        np.testing.assert_allclose(attended(there, 0, text.query), text.exact(0, 200), atol=2e-5)
        with pytest.raises(kv.InvalidArgument, match="expected a multiple"):
            there.attend(0, text.query[:5])


def test_staging_appears_in_metrics_by_model(device: torch.device, measured: Daemon) -> None:
    text, model = Text(5, 900), '{model="test-model"}'
    with measured.connect(layout=LAYOUT) as pool:
        with DeviceSequence(SparseSequence(pool, CONFIG, threads=1), device=device, staging_blocks=200) as there:
            append_to(there, text, 900)
            for _ in range(3):
                for layer in range(LAYOUT.layers):
                    there.attend(layer, text.query)
            done = there.stats()
        found = wait_for(measured, f"staging_wanted_blocks_total{model}", done["staging_wanted"])
        assert found[f"staging_hit_blocks_total{model}"] == done["staging_hits"] > 0
        assert found[f"staging_copied_blocks_total{model}"] == done["staging_copies"] > 0
        assert found[f"compared_blocks_total{model}"] == found[f"repeated_blocks_total{model}"] > 0
        stats = measured.stats()
        assert stats["sparse.staging_hit_rate"] == round(done["staging_hit_rate"], 4)
        assert stats["sparse.overlap"] == done["overlap"] == 1.0
        assert stats["usage.clamped_values"] == 0


def test_a_prefetch_that_does_not_fit_is_left_out(pool: kv.Pool, device: torch.device) -> None:
    text = Text(36, 1500)
    with both_of(pool, text, EVERYTHING, 1500, device=device, staging_blocks=12) as (host, there):
        for query in queries(36, 2):
            check_same(host, there, query)
        assert there.stats()["staging_prefetch_hits"] == 0


def test_nan_keys_are_always_read_and_reach_no_other_head(pool: kv.Pool, device: torch.device) -> None:
    text = Text(44, 1000)
    text.keys[0, 500, 0, 5] = 0x7FC0
    text.values[0, 300, 0, 7] = 0x7F80
    with both_of(pool, text, NOTHING, 1000, device=device, staging_blocks=8) as (_, there):
        for _ in range(2):
            found = attended(there, 0, text.query)
            assert np.isnan(found[:3]).all()
            assert np.isfinite(found[3:]).all()
        np.testing.assert_allclose(attended(there, 1, text.query), there.sequence.attend(1, text.query), atol=CLOSE)
