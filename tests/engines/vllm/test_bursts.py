"""Many requests at once: every stored prompt is taken whole, whatever else the step does, and what is computed twice is stored
once and whole."""

from collections.abc import Iterator

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, chunks_in_dram
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

REQUESTS = 200
# However long a promise takes on a busy machine, it is waited for.
PATIENT = {"kvpool.always_load": True, "kvpool.wait_s": 120.0, "kvpool.timeout_s": 60.0}
# Of a request that ends while half of the blocks are held for saves nothing more is saved.
ROOMY = {"max_num_seqs": 256, "num_gpu_blocks_override": 4096}


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with room for all of the prompts here."""
    with Daemon(tmp_path_factory.mktemp("daemon"), **{"dram.capacity": "1GiB"}) as daemon:
        yield daemon


def taken_tokens(engine: Engine) -> int:
    """Tokens of prompts that were not computed so far: loaded, or in vLLM's own cache since another request loaded them."""
    shown = engine.ask("counters")
    return int(sum(shown.get(f"prompt_tokens_cached_by_source/{source}", 0) for source in ("host", "device")))


def wait_stored(daemon: Daemon, chunks: int) -> None:
    """Until the pool has so many chunks, and holds none of them."""

    def are_stored() -> bool:
        stats = daemon.stats()
        held = stats["leases"] + stats["tickets"] + stats["reservations"]
        return bool(chunks_in_dram(daemon) == chunks and held == 0)

    wait_until(are_stored, f"{chunks} chunks are stored, and nothing is held")


def assert_all_taken(engine: Engine, asked: list[list[int]], expected: list[list[int]], count: int) -> None:
    before = taken_tokens(engine)
    assert engine.tokens(asked, count) == expected
    assert taken_tokens(engine) - before == loadable_tokens(asked)


@pytest.mark.parametrize("in_process", [True, False], ids=["in-one-process", "in-three-processes"])
def test_every_stored_prompt_of_a_burst_is_taken_whole(
    in_process: bool, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    engine = start_engine(GROUPED, socket=module_daemon.socket, in_process=in_process, settings=PATIENT, **ROOMY)
    before = chunks_in_dram(module_daemon)
    asked = [prompt(4000 + REQUESTS * in_process + number, 330) for number in range(REQUESTS)]
    expected = plain(GROUPED).tokens(asked, 1)
    assert engine.tokens(asked, 1) == expected
    wait_stored(module_daemon, before + loadable_tokens(asked) // CHUNK_TOKENS)
    assert_all_taken(engine, asked, expected, 1)


@pytest.mark.parametrize("in_process", [True, False], ids=["in-one-process", "in-three-processes"])
def test_prompts_with_common_prefixes_that_are_computed_at_once_are_stored_whole(
    in_process: bool, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    engine = start_engine(GROUPED, socket=module_daemon.socket, in_process=in_process, settings=PATIENT, **ROOMY)
    before = chunks_in_dram(module_daemon)
    first = 5000 + 100 * in_process
    stems = [prompt(first + number, 4 * CHUNK_TOKENS) for number in range(4)]
    asked = [
        stems[number % 4][: CHUNK_TOKENS * (1 + number // 4)] + prompt(first + 10 + number, 200) for number in range(16)
    ]
    ends = [(ids, end) for ids in asked for end in range(CHUNK_TOKENS, len(ids) + 1, CHUNK_TOKENS)]
    expected = plain(GROUPED).tokens(asked, 4)
    assert engine.tokens(asked, 4) == expected
    wait_stored(module_daemon, before + len({tuple(ids[:end]) for ids, end in ends}))
    assert_all_taken(engine, asked, expected, 4)
