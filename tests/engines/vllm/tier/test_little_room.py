"""Little room: preempted requests, a region of few rows, loads aborted under way, and a daemon that hangs beside all of it."""

import signal
from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, wait_served
from tests.engines.vllm.rigs.engine import Engine, tiering, tokens_of_answer
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import (
    TOKENS,
    answers,
    connected,
    empty,
    loaded,
    pool_tier,
    settle,
    wait_kept,
    whole_chunks,
)
from tests.rigs.daemon import Daemon, wait_until

BLOCKS = 30
# Of 128 KiB each: fewer than the prompts that wait at once need.
ROWS = 40
# No multiple of a block.
STEP_TOKENS = 90
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def cramped(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    tier = pool_tier(module_daemon.socket, timeout_s=TIMEOUT_S, batch_timeout_s=TIMEOUT_S)
    engine = start_engine(
        GROUPED,
        transfer=tiering(tier, region_bytes=ROWS << 17),
        num_gpu_blocks_override=BLOCKS,
        max_model_len=800,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
    )
    return connected(engine, module_daemon)


def test_preempted_requests_end_with_the_right_tokens(
    cramped: Engine, plain: Plain, report: Callable[[str], None]
) -> None:
    asked = [prompt(5800 + index, 150 + 17 * index) for index in range(8)]
    expected = plain(GROUPED).tokens(asked, 150)
    before, known = cramped.ask("preemptions")["count"], loaded(cramped)
    for _ in range(3):
        assert answers(cramped, asked, 150) == expected
    preemptions = cramped.ask("preemptions")["count"] - before
    assert preemptions > 0
    assert loaded(cramped) > known
    report(f"{preemptions} preemptions, {loaded(cramped) - known} chunks loaded")


@pytest.mark.parametrize("point", ["client.load.before", "client.load.before_result"])
def test_an_aborted_load_writes_into_no_block_of_another_request(
    point: str, cramped: Engine, module_daemon: Daemon, plain: Plain
) -> None:
    aborted = prompt(5840, 700)
    others = [prompt(5841 + index, 330) for index in range(3)]
    expected = plain(GROUPED).tokens(others, 40)
    kept = int(module_daemon.stats()["dram.chunks"])
    assert answers(cramped, [aborted]) == plain(GROUPED).tokens([aborted], TOKENS)
    wait_kept(module_daemon, kept if point.endswith("result") else kept + whole_chunks([aborted]))
    empty(cramped)
    cramped.ask("arm", points=f"{point}:1:delay(700ms)")
    answer = cramped.ask("abort_while_loading", prompt=aborted, others=others, tokens=40)
    cramped.ask("arm", points="")
    assert tokens_of_answer(answer) == expected
    assert answer["left"] == 0
    settle(cramped)
    assert answers(cramped, others, 40) == expected
    assert answers(cramped, [aborted]) == plain(GROUPED).tokens([aborted], TOKENS)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")


def test_a_daemon_that_hangs_costs_bounded_waits_and_no_token(
    cramped: Engine, module_daemon: Daemon, plain: Plain
) -> None:
    asked = [prompt(5860 + index, 150 + 90 * index) for index in range(4)]
    expected = plain(GROUPED).tokens(asked, TOKENS)
    for _ in range(2):
        assert answers(cramped, asked) == expected
    module_daemon.signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            assert answers(cramped, asked) == expected
    finally:
        module_daemon.signal(signal.SIGCONT)
    wait_served(cramped, module_daemon)
    for _ in range(2):
        before = loaded(cramped)
        assert answers(cramped, asked) == expected
    assert loaded(cramped) > before
    assert not module_daemon.problems()
