"""An engine with little room: prompts prefilled in pieces, requests preempted and taken up again, loads aborted under way."""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine, tokens_of_answer
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

BLOCKS = 30
# No multiple of a chunk or a block.
STEP_TOKENS = 90


@pytest.fixture(scope="module")
def cramped(start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    return start_engine(
        GROUPED,
        socket=module_daemon.socket,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=800,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
    )


def test_prefill_in_pieces_stores_and_loads_the_right_bytes(cramped: Engine, plain: Plain) -> None:
    first = prompt(600, 650)
    asked = [first, first[:300] + prompt(601, 333), first[:321], prompt(602, 770)]
    for ids in asked:
        assert cramped.tokens([ids], 16) == plain(GROUPED).tokens([ids], 16)
    before = counted(cramped, "loaded_chunks")
    for ids in reversed(asked):
        assert cramped.tokens([ids], 16) == plain(GROUPED).tokens([ids], 16)
    assert (counted(cramped, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens(asked)


def test_preempted_requests_end_with_the_right_tokens(
    cramped: Engine, plain: Plain, report: Callable[[str], None]
) -> None:
    asked = [prompt(700 + index, 150 + 17 * index) for index in range(8)]
    expected = plain(GROUPED).tokens(asked, 150)
    before, loaded = cramped.ask("preemptions")["count"], counted(cramped, "loaded_chunks")
    for _ in range(3):
        assert cramped.tokens(asked, 150) == expected
    preemptions = cramped.ask("preemptions")["count"] - before
    assert preemptions > 0
    report(f"{preemptions} preemptions, {counted(cramped, 'loaded_chunks') - loaded} chunks loaded")


@pytest.mark.parametrize("point", ["client.load.before", "client.load.before_result"])
def test_an_aborted_load_writes_into_no_block_of_another_request(
    point: str, cramped: Engine, module_daemon: Daemon, plain: Plain
) -> None:
    """The pool of blocks is so small that the others can only have those of the aborted one, which is still being loaded."""
    aborted = prompt(740, 700)
    others = [prompt(741 + index, 330) for index in range(3)]
    expected = plain(GROUPED).tokens(others, 40)
    assert cramped.tokens([aborted], 1) == plain(GROUPED).tokens([aborted], 1)
    wait_stored(module_daemon, loadable_tokens([aborted]))
    cramped.ask("arm", points=f"{point}:1:delay(700ms)")
    cramped.forget()
    answer = cramped.ask("abort_while_loading", prompt=aborted, others=others, tokens=40)
    cramped.ask("arm", points="")
    assert answer["waiting"] == ["WAITING_FOR_REMOTE_KVS"]
    assert tokens_of_answer(answer) == expected
    assert answer["left"] == 0
    # The chunks saved meanwhile are right as well.
    assert cramped.tokens(others, 40) == expected
    assert cramped.tokens([aborted], 16) == plain(GROUPED).tokens([aborted], 16)
    wait_until(lambda: module_daemon.stats()["leases"] == 0, "no lease is left")
