"""Chunks whose bytes have changed in the pool: the tokens stay the same, the chunk is dropped, no wrong one replaces it."""

import pytest

from tests.engines.vllm.conftest import Plain, Survivor, counted, wait_stored
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import wait_until


@pytest.mark.parametrize("chunk", [0, 3, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("requests", [1, 3], ids=["alone", "beside-others-with-its-prefix"])
def test_a_changed_bit_changes_no_token(chunk: int, requests: int, survivor: Survivor, plain: Plain) -> None:
    first = prompt(900, 520)
    asked = [first, first[:450] + prompt(901, 90), first + prompt(902, 70)][:requests]
    expected = plain(GROUPED).tokens(asked, 16)
    with survivor.daemon() as daemon:
        assert survivor.engine.tokens(asked, 16) == expected
        wait_stored(daemon, loadable_tokens([first]))
        survivor.engine.ask("spoil", chunk=chunk)
        assert survivor.engine.tokens(asked, 16) == expected
        assert survivor.engine.ask("has_spoiled")["spoiled"]
        wait_until(lambda: int(daemon.stats()["checksum_failures"]) > 0, "the daemon has heard of the bad chunk")
        for _ in range(2):
            before = counted(survivor.engine, "loaded_chunks")
            assert survivor.engine.tokens(asked, 16) == expected
        assert (counted(survivor.engine, "loaded_chunks") - before) * CHUNK_TOKENS >= loadable_tokens([first])
        assert not daemon.problems()


@pytest.mark.parametrize("chunk", [0, 3], ids=["first", "middle"])
def test_requests_that_share_blocks_of_a_failed_load_read_none_of_them(
    chunk: int, sync_survivor: Survivor, plain: Plain
) -> None:
    """vLLM leaves the blocks in its own prefix cache while the first request computes them again, here piece by piece."""
    engine = sync_survivor.engine
    first = prompt(920 + chunk, 520)
    asked = [first, first[:450] + prompt(930 + chunk, 90), first + prompt(940 + chunk, 70)]
    expected = plain(GROUPED).tokens(asked, 16)
    with sync_survivor.daemon() as daemon:
        engine.tokens([first], 1)
        wait_stored(daemon, loadable_tokens([first]))
        engine.ask("spoil", chunk=chunk)
        assert engine.tokens(asked, 16) == expected
        assert engine.ask("has_spoiled")["spoiled"]
        for _ in range(2):
            assert engine.tokens(asked, 16) == expected
        assert not daemon.problems()
