"""Time to the first token of an engine that generates what another one has computed, through the proxy of examples/, over HTTP.

The first engine is a producer, the second one a consumer, of a model deep enough to matter, on one node or on two.
What the second one needs for a first token is what its own `/metrics` says; prompts that it computes, loads, and has in its own
cache take turns.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.server import Server, proxy_before, vllm_server
from tests.engines.vllm.rigs.tiny_models import DEEP, Geometry
from tests.rigs.daemon import Daemon
from tests.rigs.nodes.two_nodes import pulled_chunks, two_nodes

GEOMETRY = replace(DEEP, name="quarter-as-deep", layers=3, dtype="float32")
PROMPT_TOKENS = 1500
ROUNDS = 5
TOKENS = 4
# Of the time that computing takes, by the number of nodes.
SHARE_MAX = {1: 0.2, 2: 0.3}
LOADED_TOKENS, CHUNK_TOKENS = 1472, 64
FIRST_TOKEN_SECONDS = "vllm:time_to_first_token_seconds_sum"


@dataclass(frozen=True, slots=True)
class Served:
    """The proxy, the producer and the consumer, on so many nodes. `pulled`: chunks that the consumer's node has pulled."""

    nodes: int
    proxy: Server
    prefill: Server
    decode: Server
    pulled: Callable[[], int]


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def served(
    request: pytest.FixtureRequest, model: Callable[[Geometry], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory, path = tmp_path_factory.mktemp("servers"), model(GEOMETRY)
    options = {"dram.capacity": "512MiB", "dram.huge_pages": "auto"}
    with ExitStack() as stack:
        if request.param == 1:
            first = second = stack.enter_context(Daemon(directory, **options))
        else:
            first, second = stack.enter_context(two_nodes(directory, may_have_spaces=True, **options))

        def start(role: str, daemon: Daemon) -> Server:
            transfer = {
                "kv_connector": "KVPoolConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "kvpool.socket": daemon.socket,
                    "kvpool.always_load": True,
                    "kvpool.wait_s": 20.0,  # and five seconds for a load, on a machine that is busy with other things
                    "kvpool.timeout_s": 5.0,
                },
            }
            return stack.enter_context(
                vllm_server(path, directory / f"{role}.log", transfer, "--dtype", "float32", "--max-num-seqs", "8")
            )

        prefill, decode = start("kv_producer", first), start("kv_consumer", second)
        prefill.wait_up()
        decode.wait_up()
        proxy = stack.enter_context(proxy_before(prefill, decode, directory / "proxy.log"))
        yield Served(request.param, proxy, prefill, decode, lambda: 0 if first is second else pulled_chunks(second))


@pytest.mark.timed
def test_the_first_token_of_what_another_engine_computed_comes_several_times_sooner(
    served: Served, model: Callable[[Geometry], Path], report: Callable[[str], None]
) -> None:
    proxy, prefill, decode = served.proxy, served.prefill, served.decode
    name = str(model(GEOMETRY))
    cold, warm, own, whole = [], [], [], []

    def timed(server: Server, ids: list[int], **more: object) -> tuple[float, list[int]]:
        before = decode.metric(FIRST_TOKEN_SECONDS)
        answer = server.complete(name, ids, TOKENS, **more)
        return decode.metric(FIRST_TOKEN_SECONDS) - before, answer

    for server in (prefill, decode, proxy):
        server.complete(name, prompt(4000, PROMPT_TOKENS), TOKENS)  # the first of all compiles and allocates
    hits, pulled = decode.metric("vllm:kvpool_hit_tokens_total"), served.pulled()
    for number in range(ROUNDS):
        cold.append(timed(decode, prompt(4100 + number, PROMPT_TOKENS), kv_transfer_params={"load": False})[0])
        asked = prompt(4200 + number, PROMPT_TOKENS)
        started = time.perf_counter()
        seconds, answer = timed(proxy, asked)
        whole.append(time.perf_counter() - started)
        warm.append(seconds)
        seconds, again = timed(decode, asked)
        own.append(seconds)
        # The producer loads nothing: its tokens are those of an engine without a pool.
        assert answer == again == prefill.complete(name, asked, TOKENS)
    loaded = decode.metric("vllm:kvpool_hit_tokens_total") - hits
    assert prefill.metric("vllm:kvpool_hit_tokens_total") == 0
    assert decode.metric("vllm:kvpool_saved_chunks_total") == 0
    share = statistics.median(warm) / statistics.median(cold)
    report(
        f"first token of {PROMPT_TOKENS} tokens on the second engine: {_ms(cold)} computed, {_ms(warm)} from the pool, "
        f"{share:.3f} of it, {_ms(own)} from its own cache; {_ms(whole)} for {TOKENS} tokens through the proxy, the first "
        f"engine's part included; {loaded / ROUNDS:.0f} tokens loaded each; medians of {ROUNDS} with the least and the most"
    )
    assert loaded == ROUNDS * LOADED_TOKENS
    assert served.pulled() - pulled == (ROUNDS * LOADED_TOKENS // CHUNK_TOKENS if served.nodes > 1 else 0)
    assert share <= SHARE_MAX[served.nodes]


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms ({min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f})"
