"""The demonstration's parts: its engine gives the same bits with and without the pool, and would show wrong KV."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool_client import Pool
from tests.rigs.daemon import wait_connected
from tests.rigs.fake_pool import FakePool
from tests.rigs.late_module import LateModule
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from demo.conversation import WordTokenizer, cut_prefix, read_documents  # noqa: E402
from demo.node import Daemon, make_fleet  # noqa: E402
from demo.report import Act, Row, judge, make_console, show  # noqa: E402
from kvpool_client.torch import PagedPrefixCache, layout_of  # noqa: E402

if TYPE_CHECKING:
    from demo import engine, paged_kv, worker
else:
    engine = LateModule("demo.engine")
    paged_kv = LateModule("demo.paged_kv")
    worker = LateModule("demo.worker")

pytestmark = pytest.mark.torch

CHUNK, BLOCK = 32, 16
SIZES = dict(vocabulary=300, layers=8, hidden=64, heads=4, kv_heads=2, head_dim=16, feed_forward=128, positions=1024)  # noqa: C408
PROMPT = np.random.default_rng(3).integers(0, 300, 5 * CHUNK + 7).tolist()


def _paged_kv(seed: int) -> "paged_kv.PagedKV":
    return paged_kv.PagedKV(layers=8, blocks=40, block_tokens=BLOCK, kv_heads=2, head_dim=16, seed=seed)


@pytest.fixture(scope="module")
def model() -> Any:
    return engine.build_model(engine.Shape(**SIZES), 1)


@pytest.fixture
def pool() -> Iterator[FakePool]:
    fake = FakePool(layout_of(_paged_kv(0).layers, CHUNK))
    yield fake
    assert fake.open_leases == 0
    fake.close()


def _answer(model: Any, pool: FakePool, prompt: list[int] = PROMPT, seed: int = 1, count: int = 12) -> "engine.Answer":
    """A fresh engine's answer: other blocks, nothing in them."""
    kv = _paged_kv(seed)
    prefix = PagedPrefixCache(cast(Pool, pool), kv.layers, BLOCK)
    return engine.Engine(model, kv, prefix, step_tokens=CHUNK).answer(prompt, count)


def test_the_paged_engine_agrees_with_the_model_on_its_own(model: Any, pool: FakePool) -> None:
    answer = _answer(model, pool)
    with torch.inference_mode():
        ids = torch.tensor([[*PROMPT, *answer.tokens[:-1]]])
        greedy = model(input_ids=ids).logits[0, len(PROMPT) - 1 :].argmax(-1)
    assert answer.tokens == greedy.tolist()
    assert len(set(answer.tokens)) > 3


def test_a_prompt_of_whole_chunks_still_computes_its_last_token(model: Any, pool: FakePool) -> None:
    prompt = PROMPT[: 5 * CHUNK]
    cold, warm = _answer(model, pool, prompt), _answer(model, pool, prompt, seed=2)
    assert warm.reused_tokens == 4 * CHUNK
    assert warm.logits_digest == cold.logits_digest


@pytest.mark.parametrize(
    ("chunk", "layer"),
    [(0, 7), (3, 4), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((0, 0), (2, 0), (4, 7)))],
)
def test_a_load_that_ends_early_is_recomputed_from_the_right_token(
    model: Any, pool: FakePool, chunk: int, layer: int
) -> None:
    cold = _answer(model, pool)
    pool.fail_at = (chunk, layer)
    warm = _answer(model, pool, seed=2)
    assert warm.reused_tokens == chunk * CHUNK
    assert (warm.tokens, warm.logits_digest) == (cold.tokens, cold.logits_digest)
    assert [save.is_aborted for save in pool.saves].count(True) == 1, "the pass that read what did not come"


@pytest.mark.parametrize("chunk", [0, 3, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2, 4))])
def test_another_chunks_kv_would_change_the_answer(model: Any, pool: FakePool, chunk: int) -> None:
    cold = _answer(model, pool)
    keys = list(pool.stored)
    pool.stored[keys[chunk]] = pool.stored[keys[chunk - 1]]
    warm = _answer(model, pool, seed=2)
    assert warm.reused_tokens == 5 * CHUNK
    assert warm.logits_digest != cold.logits_digest
    assert warm.tokens != cold.tokens


def test_blocks_are_wiped_and_free_again_after_use() -> None:
    kv = _paged_kv(1)
    with kv.borrow(100) as table:
        assert len(table) == 7
        kv.layers[0][:, table] = 1.0
    assert all(layer.isnan().all() for layer in kv.layers)
    with kv.borrow(40 * BLOCK), pytest.raises(MemoryError, match="0 are free"), kv.borrow(1):
        pass


def test_a_document_that_is_too_short_is_refused() -> None:
    document = read_documents(1)[0]
    with pytest.raises(AssertionError, match="expected at least"):
        cut_prefix(WordTokenizer([document.text], 4096), document, 10**6)


@pytest.mark.parametrize(
    ("cold_s", "same", "reused", "is_good"),
    [(1.0, True, 2000, True), (0.3, True, 2000, False), (1.0, False, 2000, False), (1.0, True, 0, False)],
)
def test_the_verdict_needs_speed_and_equal_tokens(
    capsys: pytest.CaptureFixture[str], cold_s: float, same: bool, reused: int, is_good: bool
) -> None:
    rows = [Row("a", 1, 2021, 2000, 1.0, 0.1, True, True), Row("a", 2, 2070, reused, cold_s, 0.1, same, True)]
    rows += [Row("b", 1, 2021, 2000, cold_s, 0.1, same, True)]
    console = make_console()
    show(console, rows, 24)
    assert judge(console, rows) is is_good
    shown = capsys.readouterr().out
    assert ("FAILED" in shown) is not is_good
    assert "speed-up" in shown


LATER = Row("a", 1, 2021, 2000, 1.0, 0.2, True, True)


@pytest.mark.parametrize("act", Act.later())
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"has_same_tokens": False}, "warm answers differ from cold ones"),
        ({"reused_tokens": 0}, "a turn reused nothing"),
        ({"tiers": ("dram", "ssd", "peer")}, "a prefix did not come from"),
        ({"tiers": ()}, "a prefix did not come from"),
    ],
)
def test_a_later_act_counts_only_with_equal_tokens_from_its_tier(
    capsys: pytest.CaptureFixture[str], act: Act, change: dict[str, Any], reason: str
) -> None:
    later = replace(LATER, act=act, tiers=(act.tier,))
    rows = [Row("a", 1, 2021, 2000, 1.0, 0.1, True, True), replace(later, **change)]
    console = make_console()
    show(console, rows, 24)
    assert judge(console, rows) is not bool(reason)
    shown = capsys.readouterr().out
    assert shown.count(act.heading) == 2, "a heading in the table, and the figures below"
    assert "first token after 200 ms instead of 1000 ms, speed-up 5.0 to 5.0" in shown
    assert ("FAILED: " in shown) is bool(reason)
    assert reason in shown


def test_a_second_node_has_what_the_first_one_stored_and_that_one_when_it_was_killed(tmp_path: Path) -> None:
    layout = kv.Layout(layers=2, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32)
    first, second = make_fleet("first", "second")
    sizes = {"dram_capacity": "16MiB", "ssd_capacity": "32MiB"}
    with (
        Daemon(tmp_path / "first", **sizes, member=first) as daemon,
        Daemon(tmp_path / "second", **sizes, member=second) as other,
        kv.connect(str(daemon.socket), model="m", layout=layout) as there,
        kv.connect(str(other.socket), model="m", layout=layout) as pool,
    ):
        wait_connected(there)
        wait_connected(pool)
        keys = pool.keys(tokens_of(1, 5 * 32))
        assert store(there, keys).stored == 5
        other.wait_known(5)
        assert worker.tiers_of(pool, tokens_of(1, 5 * 32).tolist()) == ["peer"]
        result, into = load_all(pool, keys)
        assert result.chunks == 5
        assert_right_bytes(keys, layout, result, into)
        assert other.stats()["peer.pulled_chunks"] == other.verify() == 5
        assert daemon.demote_all() == 5
        there.close()
        daemon.kill()
        daemon.start()
        with kv.connect(str(daemon.socket), model="m", layout=layout) as again:
            wait_connected(again)
            assert worker.tiers_of(again, tokens_of(1, 5 * 32).tolist()) == ["ssd"]
            result, into = load_all(again, keys)
            assert result.chunks == 5
            assert_right_bytes(keys, layout, result, into)


def test_the_base_client_does_not_import_torch() -> None:
    code = "import kvpool_client, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0
