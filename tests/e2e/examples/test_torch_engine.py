"""A torch engine over the real daemon: reuse across Pools, flipped bits, a daemon that dies. The tokens never change."""

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.late_module import LateModule
from tests.rigs.payload import flip_bit

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.torch import PagedPrefixCache, layout_of  # noqa: E402

if TYPE_CHECKING:
    from demo import engine, paged_kv
else:
    engine = LateModule("demo.engine")
    paged_kv = LateModule("demo.paged_kv")

pytestmark = pytest.mark.torch

CHUNK, BLOCK = 32, 16
SIZES = dict(vocabulary=300, layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, feed_forward=128, positions=1024)  # noqa: C408
CONNECT = kv.connect
DOCUMENT = Path(__file__).parents[3] / "docs" / "torch.md"
PROMPT = np.random.default_rng(3).integers(0, 300, 9 * CHUNK + 7).tolist()


class Worker:
    """An engine with a Pool, blocks and KV of its own."""

    def __init__(self, daemon: Daemon, model: Any, seed: int) -> None:
        paged = paged_kv.PagedKV(layers=8, blocks=40, block_tokens=BLOCK, kv_heads=2, head_dim=16, seed=seed)
        self.layout = layout_of(paged.layers, CHUNK)
        self.pool = daemon.connect(self.layout)
        wait_connected(self.pool)
        prefix = PagedPrefixCache(self.pool, paged.layers, BLOCK)
        self._engine = engine.Engine(model, paged, prefix, step_tokens=CHUNK)

    def answer(self) -> "engine.Answer":
        return self._engine.answer(PROMPT, 12)


@pytest.fixture(scope="module")
def model() -> Any:
    return engine.build_model(engine.Shape(**SIZES), 1)


@pytest.fixture
def workers(daemon: Daemon, model: Any) -> Iterator[tuple[Worker, Worker]]:
    pair = Worker(daemon, model, 1), Worker(daemon, model, 2)
    yield pair
    for worker in pair:
        worker.pool.close()


@pytest.mark.parametrize(
    ("chunk", "layer"),
    [pytest.param(0, 0, marks=pytest.mark.slow), (4, 3), pytest.param(8, 7, marks=pytest.mark.slow)],
)
def test_a_second_worker_reuses_what_the_first_computed_up_to_a_flipped_bit(
    workers: tuple[Worker, Worker], daemon: Daemon, chunk: int, layer: int
) -> None:
    first, second = workers
    cold, warm = first.answer(), second.answer()
    assert (cold.reused_tokens, cold.stored_chunks) == (0, 9)
    assert (warm.reused_tokens, warm.stored_chunks) == (9 * CHUNK, 0)
    assert daemon.stats()["leases"] == 0
    with first.pool.acquire(first.pool.lookup(first.pool.keys(PROMPT))) as lease:
        flip_bit(lease, chunk, layer * first.layout.layer_bytes + 5, mask=16)
    short = second.answer()
    assert short.reused_tokens == chunk * CHUNK
    for answer in (warm, short):
        assert (answer.tokens, answer.logits_digest) == (cold.tokens, cold.logits_digest)
    assert second.answer().reused_tokens >= chunk * CHUNK
    assert daemon.problems() == []


def test_an_exception_between_store_and_the_pass_leaves_the_prefix_to_everybody(daemon: Daemon) -> None:
    layers = [torch.zeros(2, 40, BLOCK, 2, 16) for _ in range(8)]
    table = list(range(40))
    tokens = PROMPT[: 4 * CHUNK + 1]

    def step(prefix: PagedPrefixCache) -> None:
        with contextlib.suppress(RuntimeError):
            save = prefix.store(tokens, table)
            save.layer(0)
            raise RuntimeError("the pass has failed")

    def restore(prefix: PagedPrefixCache) -> None:
        assert prefix.restore(tokens, table).tokens == 4 * CHUNK
        gc.collect()

    with daemon.connect(layout_of(layers, CHUNK)) as pool, daemon.connect(layout_of(layers, CHUNK)) as other:
        wait_connected(pool)
        wait_connected(other)
        first, second = (PagedPrefixCache(each, layers, BLOCK) for each in (pool, other))
        with pytest.warns(ResourceWarning, match="neither committed nor aborted"):
            step(first)
        wait_until(lambda: daemon.stats()["reservations"] == 0, "the save has ended")
        assert second.store(tokens, table).commit().stored == 4
        with pytest.warns(ResourceWarning, match="never released"):
            restore(first)
        wait_until(lambda: daemon.stats()["leases"] == 0, "the lease has ended")
        assert pool.connected
    assert daemon.problems() == []


def test_a_dead_daemon_costs_reuse_and_nothing_else(workers: tuple[Worker, Worker], daemon: Daemon) -> None:
    first, second = workers
    cold = first.answer()
    daemon.kill()
    warm = second.answer()
    assert (warm.tokens, warm.logits_digest) == (cold.tokens, cold.logits_digest)
    daemon.start()
    wait_connected(second.pool)
    again = second.answer()
    assert (again.reused_tokens, again.stored_chunks) == (0, 9)
    assert again.logits_digest == cold.logits_digest
    assert second.answer().reused_tokens == 9 * CHUNK


def test_a_daemon_that_dies_between_lease_and_load_shortens_it(daemon: Daemon) -> None:
    layers = [torch.randn(2, 64, BLOCK, 2, 16) for _ in range(4)]
    source = [layer.clone() for layer in layers]
    table = list(range(20))
    with daemon.connect(layout_of(layers, CHUNK)) as pool:
        wait_connected(pool)
        prefix = PagedPrefixCache(pool, layers, BLOCK)
        assert prefix.store(PROMPT, table).commit() == kv.SaveResult(9, 0, 0, ("stored",) * 9, {})
        for layer in layers:
            layer.zero_()
        restored = prefix.restore(PROMPT, table)
        daemon.kill()
        with restored:
            promised = restored.tokens
            are_good = all(restored.wait_layer(number) for number in range(4))
            assert are_good == (restored.tokens == promised)
            blocks = restored.tokens // BLOCK
        for copy, original in zip(layers, source, strict=True):
            assert torch.equal(copy[:, :blocks], original[:, :blocks])
        with prefix.restore(PROMPT, table) as missed:
            assert missed.tokens in (0, promised)
    assert Path(daemon.socket).exists()


class Squares(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is imported conditionally
    """A layer whose KV of a token is its id plus the layer, and whose output is the sum of the KV so far."""

    def __init__(self, planes: Any, layer: int) -> None:
        super().__init__()
        self._planes = planes
        self._layer = layer

    def forward(self, total: float, tokens: list[int], start: int, table: list[int]) -> float:
        for position, token in enumerate(tokens, start):
            self._planes[:, table[position // BLOCK], position % BLOCK] = float(token + self._layer)
        rows = self._planes[0, table].flatten(0, 1)[: start + len(tokens)]
        return total + float(rows.sum())


def test_the_code_of_the_document_works(daemon: Daemon) -> None:
    """Cold in several passes, and then twice warm: in one pass, and in several."""
    before, _, rest = DOCUMENT.read_text().partition("\n## Tutorial\n")
    first, second = re.findall(r"```python\n(.*?)```", before + rest.partition("\n## ")[2], re.DOTALL)
    first = first.replace("chunk_tokens=256", f"chunk_tokens={CHUNK}")
    answers, calls = [], []
    for seed, is_batch in enumerate((False, True, False)):
        layers = [torch.zeros(2, 40, BLOCK, 2, 16) for _ in range(4)]
        modules = [Squares(layer, number) for number, layer in enumerate(layers)]

        def model(tokens: list[int], start: int, table: list[int], modules: list[Squares] = modules) -> float:
            calls.append(start)
            total = 0.0
            for module in modules:
                total = module(total, tokens, start, table)
            return total

        def model_of_batch(batch: list[Any], begins: list[int], ends: list[int] | None = None) -> float:
            request, end = batch[0], ends[0] if ends else None
            return model(request.tokens[begins[0] : end], begins[0], request.block_ids)

        names: dict[str, Any] = {"layers": layers, "attention_modules": modules, "model": model_of_batch}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVPOOL_SOCKET", daemon.socket)
            patch.setattr(kv, "connect", _connect_and_wait)
            exec(first, names)
        exec(second, names)
        table = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
        batch = [SimpleNamespace(tokens=PROMPT, block_ids=table)]
        answers.append(names["prefill"](batch) if is_batch else names["prefill_in_passes"](batch, _passes))
        names["pool"].close()
    assert calls == [*range(0, 9 * CHUNK + 1, CHUNK), 9 * CHUNK, 9 * CHUNK]
    assert answers == [sum(sum(PROMPT) + layer * len(PROMPT) for layer in range(4)) * 32] * 3


def _passes(starts: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Of a chunk each."""
    for begin in range(starts[0], len(PROMPT), CHUNK):
        yield [begin], [min(len(PROMPT), begin + CHUNK)]


def _connect_and_wait(*given: Any, **named: Any) -> kv.Pool:
    pool = CONNECT(*given, **named)
    wait_connected(pool)
    return pool


@pytest.mark.slow
def test_the_demonstration_succeeds_without_a_terminal() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "demo", "--documents", "1", "--prefix-tokens", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy tokens identical in 4 of 4 turns, first-token logits bit for bit in 4" in done.stdout
    assert "kvpoold serves again: 0 chunks in DRAM, 9 on disk" in done.stdout
    assert "1045 tokens, 1024 from SSD, 0 chunks stored" in done.stdout
    assert "warm from SSD after kill -9: first token after " in done.stdout
    assert done.stderr == ""
