"""The vLLM connector as one of several in a MultiConnector: what others take leaves nothing held, and vLLM knows it by name."""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpool_client as kv
from tests import fake_vllm
from tests.daemon import Daemon, wait_until
from tests.payload import store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.unit.vllm_setting import CHUNK, StartEngine, ask, prompt, start_engine  # noqa: E402 - only where torch is
from tests.vllm_engine import Blocks, ScriptedEngine  # noqa: E402 - likewise
from tests.vllm_request import Request  # noqa: E402 - likewise

__all__ = ["start_engine"]
pytestmark = pytest.mark.torch

TOKENS = prompt(1, 5 * CHUNK + 1)


def offered(engine: ScriptedEngine, request: Request, held: int = 0) -> int:
    """Tokens that the pool offers, once its daemon has answered."""
    said: list[Any] = []

    def is_told() -> bool:
        said.append(engine.scheduler.get_num_new_matched_tokens(request, held)[0])
        return said[-1] is not None

    wait_until(is_told, "the pool has an answer")
    return int(said[-1])


def wait_nothing_held(daemon: Daemon) -> None:
    """Until no lease and no ticket is left, long before their time to live is over."""
    wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["tickets"] == 0, "nothing is held")


def test_the_name_is_registered_wherever_vllm_loads_plugins() -> None:
    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["vllm.general_plugins"]
    entry = importlib.metadata.EntryPoint("kvpool", named["kvpool"], "vllm.general_plugins")
    with fake_vllm.installed():
        registry = fake_vllm.KVConnectorFactory.registry
        for _ in range(2):
            entry.load()()
        assert registry == {"KVPoolConnector": ("kvpool_client.vllm.connector", "KVPoolConnector")}


def test_the_name_is_registered_where_plugins_are_switched_off() -> None:
    with fake_vllm.installed():
        from kvpool_client.vllm import connector

        assert connector.KVPoolConnector is not None
        assert "KVPoolConnector" in fake_vllm.KVConnectorFactory.registry


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_connector_takes_leaves_no_ticket(start_engine: StartEngine, daemon: Daemon, ranks: int) -> None:
    engine = start_engine(ranks=ranks)
    ask(engine, "cold", TOKENS)
    request = Request("taken", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    assert daemon.stats()["tickets"] == 1
    engine.scheduler.update_state_after_alloc(request, Blocks([]), 0)
    wait_nothing_held(daemon)
    engine.scheduler.request_finished_all_groups(request, ([],))


def test_a_request_whose_load_by_another_has_failed_is_offered_nothing(start_engine: StartEngine) -> None:
    engine = start_engine()
    ask(engine, "cold", TOKENS)
    request = Request("failed", list(TOKENS))
    request.num_preemptions = 0  # type: ignore[attr-defined]  # as vLLM has it
    assert offered(engine, request) == 5 * CHUNK
    assert offered(engine, request) == 5 * CHUNK, "there was no room yet"
    engine.scheduler.update_state_after_alloc(request, Blocks([]), 0)
    assert offered(engine, request) == 0
    request.num_preemptions = 1  # type: ignore[attr-defined]
    assert offered(engine, request) == 5 * CHUNK
    engine.scheduler.request_finished_all_groups(request, ([],))


def test_a_request_that_ends_before_it_runs_leaves_no_ticket(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine()
    ask(engine, "cold", TOKENS)
    request = Request("aborted", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    engine.scheduler.request_finished_all_groups(request, ([],))
    wait_nothing_held(daemon)


def test_a_question_that_is_asked_anew_leaves_the_first_ones_ticket(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine()
    ask(engine, "cold", TOKENS)
    request = Request("longer", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    assert offered(engine, request, 2 * CHUNK) == 3 * CHUNK
    wait_until(lambda: daemon.stats()["tickets"] == 1, "the first ticket is given back")
    engine.scheduler.request_finished_all_groups(request, ([],))
    wait_nothing_held(daemon)


def test_a_daemon_that_comes_back_has_no_ticket_to_end(start_engine: StartEngine, daemon: Daemon) -> None:
    engine = start_engine(kvpool__timeout_s=0.5)
    ask(engine, "cold", TOKENS)
    request = Request("taken", list(TOKENS))
    assert offered(engine, request) == 5 * CHUNK
    daemon.kill()
    engine.scheduler.update_state_after_alloc(request, Blocks([]), 0)
    engine.scheduler.request_finished_all_groups(request, ([],))
    assert ask(engine, "away", TOKENS).generated == 1


def test_another_models_scheduler_ends_no_ticket(daemon: Daemon) -> None:
    layout = kv.Layout(layers=2, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=16)
    with daemon.connect(layout) as pool, daemon.connect(layout, model="other") as other:
        keys = pool.keys(list(range(64)))
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            ticket = lease.ticket()
        assert other.claim(ticket).chunks == 0
        with pool.claim(ticket) as claimed:
            assert claimed.chunks == 4
