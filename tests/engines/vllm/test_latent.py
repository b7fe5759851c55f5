"""Latent attention (MLA) over one and two ranks: stored once and loaded, or refused with the reason.

vLLM's reference backend for processors without AMX attends to no prefix that it has not computed. Without any pool both
backends give a prompt other tokens from batch to batch: tokens are not compared.
"""

from collections.abc import Callable

import pytest

from tests.engines.vllm.conftest import StartEngine, loaded_tokens, wait_loaded
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompts
from tests.engines.vllm.rigs.tiny_models import LATENT
from tests.rigs.daemon import Daemon, wait_until

REASON = "the engine runs without a pool: the engine computes MLA without prefix caching"


@pytest.mark.parametrize("ranks", [1, 2])
def test_latents_are_stored_once_or_refused_with_the_reason(
    start_engine: StartEngine, module_daemon: Daemon, report: Callable[[str], None], ranks: int
) -> None:
    engine = start_engine(
        LATENT,
        socket=module_daemon.socket,
        in_process=ranks == 1,
        tensor_parallel_size=ranks,
        **({"distributed_executor_backend": "mp"} if ranks > 1 else {}),
        # What each backend takes.
        block_size=32 if _has_amx() else 16,
        dtype="bfloat16" if _has_amx() else "float32",
    )
    asked = prompts(first=2100 + 100 * ranks)
    engine.tokens(asked, 8)
    is_refused = REASON in engine.log()
    report("refused with the reason" if is_refused else "kept")
    assert is_refused != _has_amx()
    if is_refused:
        assert module_daemon.stats()["dram.chunks"] == 0
        return
    stored = loadable_tokens(asked) // CHUNK_TOKENS
    wait_until(lambda: int(module_daemon.stats()["dram.chunks"]) >= stored, "latents are stored")
    before = loaded_tokens(module_daemon)
    engine.tokens(asked, 8)
    wait_loaded(module_daemon, before + loadable_tokens(asked))
    assert not module_daemon.problems()


def _has_amx() -> bool:
    import torch  # of the engines' environment

    return bool(torch.cpu._is_amx_tile_supported())
