"""Tensor parallelism over two real ranks: each stores its shard, and a prefix is worth what every rank can give of it."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.daemon import Daemon, wait_until
from tests.engines.vllm.conftest import StartEngine, loaded_tokens, wait_loaded
from tests.engines.vllm.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.prompts import loadable_tokens, prompts
from tests.engines.vllm.tiny_models import GROUPED

RANKS = 2
PAGE = 4096


@pytest.fixture(scope="module", params=["async", "sync"])
def ranks(request: pytest.FixtureRequest, start_engine: StartEngine, module_daemon: Daemon) -> Engine:
    with module_daemon.admin() as admin:
        admin.flush(None, None)
    return start_engine(
        GROUPED,
        socket=module_daemon.socket,
        settings={"kvpool.load": request.param},
        in_process=False,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )


def test_two_ranks_load_what_they_computed(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2000)
    computed = ranks.tokens(asked, 16)
    wait_until(lambda: _chunks(module_daemon) >= RANKS * loadable_tokens(asked) // CHUNK_TOKENS, "shards are stored")
    assert _chunks(module_daemon) % RANKS == 0
    before = loaded_tokens(module_daemon)
    assert ranks.tokens(asked, 16) == computed
    wait_loaded(module_daemon, before + loadable_tokens(asked))
    shown = ranks.ask("counters")
    assert shown["kvpool_loaded_chunks"] >= RANKS * loadable_tokens(asked) // CHUNK_TOKENS
    assert not module_daemon.problems()


def test_bad_bytes_of_some_ranks_change_no_token(ranks: Engine, module_daemon: Daemon) -> None:
    asked = prompts(first=2040)
    computed = ranks.tokens(asked, 16)
    wait_until(
        lambda: _chunks(module_daemon) >= 2 * RANKS * loadable_tokens(asked) // CHUNK_TOKENS, "shards are stored"
    )
    before = int(module_daemon.stats()["checksum_failures"])
    _turn_bits(module_daemon)
    for _ in range(2):
        assert ranks.tokens(asked, 16) == computed
    wait_until(lambda: int(module_daemon.stats()["checksum_failures"]) > before, "the daemon has heard of bad chunks")


def _chunks(daemon: Daemon) -> int:
    return int(daemon.stats()["dram.chunks"])


def _turn_bits(daemon: Daemon) -> None:
    """Change a bit of every tenth page that holds something, behind everybody's back: of chunks of one rank, or the other."""
    assert daemon.process is not None
    fds = Path(f"/proc/{daemon.process.pid}/fd")
    arena = next(fd for fd in fds.iterdir() if os.readlink(fd).startswith("/memfd:kvpool-arena"))
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = np.frombuffer(memory, np.uint8).reshape(-1, PAGE)
        used = np.flatnonzero(pages.any(axis=1))[::10]
        assert used.size > 0
        pages[used, 77] ^= 16
        del pages
