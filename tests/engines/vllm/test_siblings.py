"""The connector among others in vLLM's MultiConnector, found by its name alone: tokens, tickets, waiting times of others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, counted
from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until

STUB: dict[str, object] = {
    "kv_connector": "ClaimingStub",
    "kv_connector_module_path": "tests.engines.vllm.rigs.claiming_stub",
}
REQUESTS = 100


def waits_for_the_daemon(engine: Engine) -> int:
    """Requests that were held back for an answer so far."""
    return int(engine.ask("counters").get("kvpool_waits_for/the_daemon", 0))


def wait_nothing_held(daemon: Daemon) -> None:
    """Until no lease and no ticket is left, long before their time to live is over."""
    wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["tickets"] == 0, "nothing is held")


@pytest.mark.parametrize("in_process", [True, False], ids=["in-one-process", "in-three-processes"])
def test_beside_vllms_own_connector_tokens_are_the_same_and_hits_are_counted(
    in_process: bool, start_engine: StartEngine, module_daemon: Daemon, plain: Plain, tmp_path: Path
) -> None:
    """Both store everything; the first one named serves. vLLM's own knows no groups, so they are off."""
    example: dict[str, object] = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = start_engine(
        GROUPED,
        socket=module_daemon.socket,
        siblings=[None, example],
        in_process=in_process,
        disable_hybrid_kv_cache_manager=True,
    )
    asked = prompts(first=2000 + 20 * in_process)
    expected = plain(GROUPED).tokens(asked, 16)
    for _ in range(3):
        assert engine.tokens(asked, 16) == expected
    shown = engine.ask("counters")
    assert shown["kvpool_hit_tokens/dram"] >= loadable_tokens(asked)
    assert any(tmp_path.iterdir()), "the other connector has stored too"
    wait_nothing_held(module_daemon)


def test_beside_a_connector_that_claims_everything_nothing_stays_held(
    start_engine: StartEngine, module_daemon: Daemon, plain: Plain, report: Callable[[str], None]
) -> None:
    engine = start_engine(GROUPED, socket=module_daemon.socket, siblings=[STUB, None])
    asked = prompts(first=2100)
    expected = plain(GROUPED).tokens(asked, 16)
    for _ in range(3):
        assert engine.tokens(asked, 16) == expected
    assert counted(engine, "saved_chunks") * CHUNK_TOKENS >= loadable_tokens(asked)
    wait_nothing_held(module_daemon)
    many = [prompt(2200 + number % 20, 257 + number) for number in range(REQUESTS)]
    engine.tokens(many, 1)
    engine.ask("watch_connector")
    waits = waits_for_the_daemon(engine)
    engine.tokens(many, 1)
    delays = sorted(engine.ask("connector_seconds")["until_answered"])
    assert len(delays) == REQUESTS
    report(
        f"{REQUESTS} requests wait {delays[REQUESTS // 2] * 1e3:.2f} ms for an answer, p99 {delays[-2] * 1e3:.2f} ms"
    )
    assert waits_for_the_daemon(engine) == waits
    wait_nothing_held(module_daemon)


@pytest.mark.parametrize("in_process", [True, False], ids=["in-one-process", "in-three-processes"])
def test_a_second_child_of_kvpools_is_refused_in_one_line_and_the_first_one_serves(
    in_process: bool, start_engine: StartEngine, module_daemon: Daemon, plain: Plain
) -> None:
    engine = start_engine(GROUPED, socket=module_daemon.socket, siblings=[None, None], in_process=in_process)
    logged = [line for line in engine.log().splitlines() if "connector of kvpool's already" in line]
    assert len(logged) == 1, logged
    assert "a second connector of kvpool's does nothing" in logged[0]
    assert "name kvpool once among the connectors" in logged[0]
    asked = prompts(first=2300 + 20 * in_process)
    expected = plain(GROUPED).tokens(asked, 16)
    for _ in range(3):
        assert engine.tokens(asked, 16) == expected
    shown = engine.ask("counters")
    assert shown["kvpool_hit_tokens/dram"] >= loadable_tokens(asked)
    assert shown["kvpool_refusals/second_child"] == 2, "the scheduler's half and the worker's"
    wait_nothing_held(module_daemon)
