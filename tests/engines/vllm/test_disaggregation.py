"""Disaggregation as it is run: one engine computes prompts, one generates, the proxy of examples/ before both, over HTTP."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.vllm.rigs.engine import CHUNK_TOKENS, Engine
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.server import Server, proxy_before, vllm_server
from tests.engines.vllm.rigs.tiny_models import GROUPED, Geometry
from tests.rigs.daemon import Daemon, wait_until

TOKENS = 16
LONG = 1900
PROMPTS_MAX = 12
HIT_TOKENS = "vllm:kvpool_hit_tokens_total"


@pytest.fixture(scope="module")
def served(
    model: Callable[[Geometry], Path], module_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server, Server]]:
    """The proxy and the two engines. The first computes a long prompt in many steps."""
    directory, path = tmp_path_factory.mktemp("servers"), model(GROUPED)
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kvpool.socket": module_daemon.socket,
            "kvpool.always_load": True,
            "kvpool.wait_s": 20.0,  # and ten seconds for a save, on a machine that is busy with other things
            "kvpool.timeout_s": 10.0,
        },
    }
    own = ("--dtype", GROUPED.dtype)
    steps = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "8")
    with ExitStack() as stack:
        prefill = stack.enter_context(vllm_server(path, directory / "prefill.log", transfer, *own, *steps))
        decode = stack.enter_context(vllm_server(path, directory / "decode.log", transfer, *own))
        prefill.wait_up()
        decode.wait_up()
        yield stack.enter_context(proxy_before(prefill, decode, directory / "proxy.log")), prefill, decode


def test_the_second_engine_computes_a_chunk_and_a_token_at_most(
    served: tuple[Server, Server, Server],
    plain: Callable[[Geometry], Engine],
    model: Callable[[Geometry], Path],
    report: Callable[[str], None],
) -> None:
    proxy, prefill, decode = served
    for number, length in enumerate((333, 700, 1500)):
        asked, hits = prompt(900 + number, length), decode.metric(HIT_TOKENS)
        assert proxy.complete(str(model(GROUPED)), asked, TOKENS) == plain(GROUPED).tokens([asked], TOKENS)[0]
        computed = length - (decode.metric(HIT_TOKENS) - hits)
        report(f"of {length} tokens the second engine computed {computed:.0f}")
        assert computed <= CHUNK_TOKENS + 1
    assert prefill.metric("vllm:generation_tokens_total") == 3


def test_the_second_engine_waits_for_what_the_first_is_still_saving(
    served: tuple[Server, Server, Server],
    module_daemon: Daemon,
    plain: Callable[[Geometry], Engine],
    model: Callable[[Geometry], Path],
) -> None:
    """The first has answered, and no chunk of its prompt is visible yet."""
    proxy, _, decode = served
    asked, answers = prompt(940, 700), []
    client = threading.Thread(
        target=lambda: answers.append(proxy.complete(str(model(GROUPED)), asked, TOKENS)), daemon=True
    )
    waits, hits = decode.metric("vllm:kvpool_waits_for_total"), decode.metric(HIT_TOKENS)
    module_daemon.signal(signal.SIGSTOP)
    client.start()
    try:
        wait_until(lambda: decode.metric("vllm:kvpool_waits_for_total") > waits, "the second engine waits")
    finally:
        module_daemon.signal(signal.SIGCONT)
    client.join(120)
    assert 700 - (decode.metric(HIT_TOKENS) - hits) <= CHUNK_TOKENS + 1
    assert answers == plain(GROUPED).tokens([asked], TOKENS)


def test_a_first_engine_that_dies_amid_a_prompt_costs_its_rest(
    served: tuple[Server, Server, Server],
    module_daemon: Daemon,
    plain: Callable[[Geometry], Engine],
    model: Callable[[Geometry], Path],
) -> None:
    proxy, prefill, _ = served
    for number in range(PROMPTS_MAX):  # an engine can be through a prompt before a test on a busy processor stops it
        asked = prompt(950 + number, LONG)
        answers: list[list[int]] = []
        client, stored = _asked_until_a_chunk_is_stored(
            proxy, prefill, module_daemon, str(model(GROUPED)), asked, answers
        )
        if amid := 0 < stored < LONG // CHUNK_TOKENS:
            prefill.signal(signal.SIGKILL)
        else:
            prefill.signal(signal.SIGCONT)
        client.join(120)
        assert answers == plain(GROUPED).tokens([asked], TOKENS)
        if amid:
            break
    else:
        pytest.fail(f"the first engine was through each of {PROMPTS_MAX} prompts before it could be stopped")
    again = prompt(949, 333)
    assert proxy.complete(str(model(GROUPED)), again, TOKENS) == plain(GROUPED).tokens([again], TOKENS)[0]
    assert module_daemon.problems() == []


def _asked_until_a_chunk_is_stored(
    proxy: Server, prefill: Server, daemon: Daemon, model: str, asked: list[int], answers: list[list[int]]
) -> tuple[threading.Thread, int]:
    """The client that asks, and how many chunks are stored when the first engine has been stopped."""
    before = int(daemon.stats()["saved_chunks"])
    client = threading.Thread(target=lambda: answers.append(proxy.complete(model, asked, TOKENS)), daemon=True)
    client.start()

    def stored_chunks() -> int:
        return int(daemon.stats()["saved_chunks"]) - before

    def stopped_with_a_chunk_stored() -> bool:
        """True once it is, or once all is answered; the engine else runs on for a moment."""
        prefill.signal(signal.SIGSTOP)
        if stored_chunks() > 0 or not client.is_alive():
            return True
        prefill.signal(signal.SIGCONT)
        return False

    wait_until(stopped_with_a_chunk_stored, "the first chunk is stored")
    return client, stored_chunks()
