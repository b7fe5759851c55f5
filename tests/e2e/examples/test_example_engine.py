"""The example engine: the same tokens from all schedulers with all caches, after a restart and a kill -9; no block leaks."""

import dataclasses
import json
from collections import deque
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

import kvpool_client as kv
from demo.node import Daemon
from examples.engine import report
from examples.engine.attention import TILE, Span
from examples.engine.benchmark import main
from examples.engine.cells import Cache, Cell, Plan
from examples.engine.engine import Counts, Engine, NoRoom
from examples.engine.model import SMALL, Model
from examples.engine.sampling import Sampler
from examples.engine.schedulers import SCHEDULERS
from examples.engine.workload import GROUP, SHORT, Lengths, Request, make_requests
from tests.rigs.daemon import Daemon as Served
from tests.rigs.daemon import wait_connected

pytestmark = pytest.mark.torch

SEED = 3
REQUESTS = make_requests(12, seed=SEED, vocabulary=SMALL.vocabulary, lengths=SHORT)
PLAN = Plan(SMALL, REQUESTS, 400, SEED)


def run(scheduler: str, *, num_blocks: int = 400, reuse: bool = True) -> Engine:
    """An engine that has answered all requests, and leaks nothing."""
    engine = Engine(Model(SMALL, SEED), num_blocks, reuse=reuse)
    SCHEDULERS[scheduler](engine, deque(REQUESTS))
    assert engine.close() == []
    assert sorted(engine.answers) == [request.number for request in REQUESTS]
    return engine


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    """Answers one by one, with nothing shared."""
    engine = run("naive", reuse=False)
    assert engine.counts.reused_tokens == engine.counts.reused_logits == 0
    return engine.answers


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_tokens_are_the_same_in_every_order_with_and_without_a_cache(
    scheduler: str, plain: dict[int, list[int]]
) -> None:
    if scheduler != "naive":  # which is the plain one
        assert run(scheduler, reuse=False).answers == plain
    cached = run(scheduler)
    assert cached.answers == plain
    assert cached.counts.reused_tokens > cached.counts.prompt_tokens / 2


@pytest.mark.parametrize(
    "scheduler", [pytest.param(name, marks=[] if name == "online" else pytest.mark.slow) for name in SCHEDULERS]
)
def test_tokens_are_the_same_where_requests_wait_for_blocks_and_prefixes_are_evicted(
    scheduler: str, plain: dict[int, list[int]]
) -> None:
    engine = run(scheduler, num_blocks=20)
    assert engine.answers == plain
    assert engine.blocks.stats()["evicted_blocks"] > 0


def test_a_request_that_does_not_fit_alone_is_named() -> None:
    engine = Engine(Model(SMALL, SEED), 2)
    with pytest.raises(NoRoom, match=r"request 0 of \d+ tokens has no room in blocks of 32 tokens"):
        SCHEDULERS["online"](engine, deque(REQUESTS))
    assert engine.close() == []


def test_an_exact_repeat_runs_no_forward_pass_before_its_first_token() -> None:
    model = Model(SMALL, SEED)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    engine = Engine(model, 400)
    prompt = REQUESTS[0].prompt
    waiting = [Request(number, prompt, 5, top_p=0.0, seed=number) for number in range(2)]
    SCHEDULERS["naive"](engine, deque(waiting))
    assert engine.counts.reused_logits == 1
    assert engine.counts.reused_tokens == len(prompt)
    assert len(passes) == 5 + 4
    assert engine.answers[0] == engine.answers[1]
    assert engine.close() == []


def test_computed_at_once_in_parts_or_in_a_batch_a_token_has_the_same_bits() -> None:
    model = Model(SMALL, SEED)
    prompt = REQUESTS[5].prompt
    blocks = -(-len(prompt) // TILE)
    tables = [torch.arange(number * blocks, (number + 1) * blocks) for number in range(3)]

    def pages() -> list[torch.Tensor]:
        shape = (3 * blocks, 2, TILE, SMALL.kv_heads, SMALL.head_dim)
        return [torch.zeros(shape) for _ in range(SMALL.layers)]

    whole, parts, batch = pages(), pages(), pages()
    expected = model([Span(prompt, 0, tables[0])], whole)[0]
    for start, end in ((0, 7), (7, 40), (40, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
        found = model([Span(prompt[start:end], start, tables[0])], parts)[0]
    assert torch.equal(found, expected)
    model([Span(prompt[:30], 0, tables[1]), Span(prompt[:-1], 0, tables[0]), Span(prompt[:9], 0, tables[2])], batch)
    spans = [Span(prompt[30:31], 30, tables[1]), Span(prompt[-1:], len(prompt) - 1, tables[0])]
    assert torch.equal(model(spans, batch)[1], expected)
    for layer, other in zip(whole, parts, strict=True):
        assert torch.equal(layer, other)
    for layer, other in zip(whole, batch, strict=True):
        assert torch.equal(layer[:blocks], other[:blocks])


def test_top_p_chooses_from_the_nucleus_by_the_requests_own_numbers() -> None:
    logits = torch.tensor([0.0, 5.0, 4.9, -3.0])
    chosen = [Sampler(top_p=0.9, seed=seed).choose(logits) for seed in range(60)]
    assert set(chosen) == {1, 2}
    assert chosen == [Sampler(top_p=0.9, seed=seed).choose(logits) for seed in range(60)]
    assert Sampler(top_p=1e-6, seed=1).choose(logits) == Sampler(top_p=0.0, seed=1).choose(logits) == 1


@pytest.mark.parametrize("seed", range(2))
def test_the_workload_is_as_large_as_its_page_states(seed: int) -> None:
    requests = make_requests(GROUP, seed=seed, vocabulary=2048, lengths=Lengths())
    prompts = [tuple(request.prompt) for request in requests]
    assert (len(requests), sum(map(len, prompts))) == (64, 54_784)
    assert sum(request.answer_tokens for request in requests) == 1_024
    assert len(set(prompts)) == 48
    heads = {hash(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert len(heads) == 3_365


@pytest.mark.slow
def test_a_restarted_engine_and_one_behind_a_killed_daemon_answer_from_the_pool(
    tmp_path: Path, plain: dict[int, list[int]]
) -> None:
    with Daemon(tmp_path / "node", dram_capacity="64MiB", ssd_capacity="64MiB") as daemon:
        socket = str(daemon.socket)
        cells = [PLAN.run("online", Cache.POOL, socket), PLAN.run("naive", Cache.RESTARTED, socket)]
        daemon.demote_all()
        daemon.kill()
        daemon.start()
        cells.append(PLAN.run("offline", Cache.KILLED, socket))
        assert daemon.verify() > 0
    for cell in cells:
        assert (cell.answers, cell.problems) == (plain, [])
    first, *later = (cell.counts.prompt_tokens - cell.counts.reused_tokens for cell in cells)
    assert max(later) < first


def test_a_repeat_whose_blocks_were_evicted_comes_whole_from_the_pool(daemon: Served) -> None:
    layout = kv.Layout(
        layers=SMALL.layers, kv_heads=SMALL.kv_heads, head_dim=SMALL.head_dim, dtype="float32", chunk_tokens=32
    )
    prompt, other = (REQUESTS[number].prompt + REQUESTS[number].prompt[::-1] for number in (0, 1))
    first = Request(0, prompt[:64], 3, top_p=0.0, seed=0)
    evicting = Request(1, other[-120:], 3, top_p=0.0, seed=0)
    again = dataclasses.replace(first, number=2)
    engines = []
    for waiting in ([first], [first, evicting, again]):
        with daemon.connect(layout) as pool:
            wait_connected(pool)
            engines.append(Engine(Model(SMALL, SEED), 8, pool=pool))
            SCHEDULERS["naive"](engines[-1], deque(waiting))
            assert engines[-1].close() == []
    before, after = engines
    assert after.counts.reused_logits == 1
    assert after.counts.reused_tokens == 32 + 64
    assert before.answers[0] == after.answers[0] == after.answers[2]


@pytest.mark.slow
def test_the_benchmark_prints_all_cells() -> None:
    done = CliRunner().invoke(main, ["--quick", "--requests", "6", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["failures"] == []
    cells = [(cell["scheduler"], cell["cache"]) for cell in document["cells"]]
    assert cells == [(scheduler, cache.label) for scheduler in SCHEDULERS for cache in Cache]


def test_other_tokens_leaked_blocks_and_missed_bars_are_reported() -> None:
    base = Cell("naive", Cache.NONE, 8.0, Counts(8.0, 1.0, 10, 1), {0: [1]}, [])
    slow = dataclasses.replace(
        base, cache=Cache.PREFIX, answers={0: [2]}, problems=["1 blocks are not free at the end"]
    )
    assert report.failures([base, base]) == []
    assert report.failures([base, slow]) == [
        "naive, prefix cache: 1 blocks are not free at the end",
        "naive, prefix cache: other tokens than the first cell",
    ]
    fast = dataclasses.replace(base, cache=Cache.PREFIX, elapsed_s=4.0, counts=Counts(0.5, 1.0, 10, 1))
    assert report.missed_bars(report.rows_of([base, fast])) == []
    assert report.missed_bars(report.rows_of([base, slow])) == [
        "naive, prefix cache: prefill_x is 1.0, expected 8",
        "naive, prefix cache: total_x is 1.0, expected 1.5",
    ]
