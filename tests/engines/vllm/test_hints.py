"""Hints in a request's `kv_transfer_params` through a real vLLM, and the pool's events in vLLM's stream of KV events."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.events import EventKind, StoredChunk
from kvpool.router_events.columns import unpack_chunks, unpack_events
from kvpool.states import DEFAULT_PRIORITY
from tests.engines.vllm.conftest import Plain, StartEngine
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, CHUNK_TOKENS, Engine, tokens_of_answer
from tests.engines.vllm.rigs.prompts import prompt
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.events.router import Index, Router

# Requests that run at once; the others wait.
WAIT_BEHIND = 2


@dataclass
class Setting:
    """An engine that publishes its KV events, the pool's among them."""

    engine: Engine
    daemon: Daemon
    directory: Path

    def generate(self, asked: list[list[int]], count: int, params: list[Any]) -> dict[str, Any]:
        self.engine.forget()
        return self.engine.ask("generate", prompts=asked, tokens=count, params=params)

    def router(self) -> Router:
        router = Router(f"ipc://{self.directory}/publish", f"ipc://{self.directory}/replay")
        router.index = Index(is_strict=False)
        return router


@pytest.fixture(scope="module")
def setting(start_engine: StartEngine, module_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    directory = tmp_path_factory.mktemp("events")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory}/publish",
        "replay_endpoint": f"ipc://{directory}/replay",
    }
    options: dict[str, Any] = {"socket": module_daemon.socket, "settings": {"kvpool.events": True}, "kv_events": events}
    return Setting(start_engine(GROUPED, max_num_seqs=WAIT_BEHIND, **options), module_daemon, directory)


def chunks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    ends = range(CHUNK_TOKENS, len(tokens) + 1, CHUNK_TOKENS)
    return [tuple(tokens[end - CHUNK_TOKENS : end]) for end in ends]


def ids_of(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, "<i4").tolist()
    return ids


def stored(daemon: Daemon) -> dict[tuple[int, ...], StoredChunk]:
    """The daemon's chunks, by token ids."""
    chunks: dict[tuple[int, ...], StoredChunk] = {}
    with daemon.admin() as admin:
        cursor = 0
        while cursor >= 0:
            page = admin.snapshot(cursor)
            chunks.update({tuple(ids_of(chunk.tokens)): chunk for chunk in unpack_chunks(page.chunks)})
            cursor = page.cursor
    return chunks


def test_priorities_reach_the_pool_and_the_answer_comes_back(setting: Setting, plain: Plain) -> None:
    asked = prompt(900, 4 * CHUNK_TOKENS + 5)
    wanted = {
        "retention": [{"start": 0, "end": CHUNK_TOKENS, "priority": 90, "duration": 600}],
        "decode_priority": 10,
        "kv_hints": {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [
                {
                    "action_id": "keep",
                    "action_type": "kv.retain",
                    "action_version": "1.0",
                    "payload": {"start": 3 * CHUNK_TOKENS, "priority": 60},
                },
                {"action_id": "move", "action_type": "kv.share", "action_version": "1.0", "payload": {}},
            ],
        },
    }
    answer = setting.generate([asked], 2 * CHUNK_TOKENS, [wanted])
    (generated,) = tokens_of_answer(answer)
    assert [generated] == plain(GROUPED).tokens([asked], 2 * CHUNK_TOKENS)
    found = stored(setting.daemon)
    kept = [found[chunk].priority for chunk in chunks_of([*asked, *generated[:-1]])]
    # The prompt ends in the fifth chunk, which is therefore the prompt's.
    assert kept == [90, DEFAULT_PRIORITY, DEFAULT_PRIORITY, 60, 60, 10]
    outcomes = answer["params"][0]["kvpool_hints"]["outcomes"]
    assert [(entry["action_id"], entry["status"]) for entry in outcomes] == [
        ("keep", "accepted"),
        ("move", "rejected"),
        ("", "accepted"),
    ]


def test_hints_in_vllms_own_form_reach_the_pool(setting: Setting, plain: Plain) -> None:
    asked = prompt(905, 3 * CHUNK_TOKENS + 5)
    retain = {"action_id": "keep", "action_type": "kv.retain", "action_version": "1.0"}
    payload = {"end": CHUNK_TOKENS, "priority": 85}
    hints = {"protocol_version": "0.1", "message_id": "own", "actions": [{**retain, "payload": payload}]}
    answer = setting.engine.ask("generate_hinted", prompt=asked, tokens=CHUNK_TOKENS, hints=hints)
    assert [answer["tokens"]] == plain(GROUPED).tokens([asked], CHUNK_TOKENS)
    found = stored(setting.daemon)
    assert [found[chunk].priority for chunk in chunks_of(asked)] == [85, DEFAULT_PRIORITY, DEFAULT_PRIORITY]
    reply = answer["params"]["kvpool_hints"]
    assert reply["message_id"] == "own"
    assert [(entry["action_id"], entry["status"]) for entry in reply["outcomes"]] == [("keep", "accepted")]


def test_tokens_are_the_same_with_any_hints(setting: Setting, plain: Plain) -> None:
    asked = [prompt(910 + number, 200 + number) for number in range(8)]
    params: list[Any] = [
        None,
        {"retention": [{"priority": 100}], "decode_priority": 0},
        {"retention": "everything", "decode_priority": -5, "kv_hints": ["no", "envelope"]},
        {"retention": [{"start": 1 << 62, "priority": 3}, {}], "do_remote_decode": True},
        {"kv_hints": {"protocol_version": "1.0", "message_id": "m", "actions": [{"action_id": 5}, None]}},
        {"kv_hints": "{]"},
        {"decode_duration_s": 1e300, "decode_priority": True},
        {"something": {"else": [1, 2]}},
    ]
    expected = plain(GROUPED).tokens(asked, 24)
    for _ in range(2):
        answer = setting.generate(asked, 24, params)
        assert tokens_of_answer(answer) == expected
        assert [params is None for params in answer["params"]] == [True, *[False] * 6, True]
    assert setting.engine.log().count("a hint of a request was rejected") == 1
    assert not setting.daemon.problems()


def test_requests_that_wait_are_announced(setting: Setting, plain: Plain) -> None:
    waiting = [prompt(950 + number, 200) for number in range(3)]
    setting.generate(waiting, 1, [None] * 3)
    before = setting.engine.ask("counters").get("kvpool_announced_chunks", 0)
    busy = [prompt(960 + number, 70) for number in range(WAIT_BEHIND)]
    answer = setting.generate([*busy, *waiting], 8, [None] * (len(busy) + len(waiting)))
    assert tokens_of_answer(answer) == plain(GROUPED).tokens([*busy, *waiting], 8)
    setting.engine.ask("generate", prompts=[prompt(941, 3)], tokens=2)
    announced = setting.engine.ask("counters").get("kvpool_announced_chunks", 0) - before
    assert announced >= sum(len(chunks_of(ids)) for ids in waiting)


def test_stored_events_have_the_token_ids_that_were_computed(setting: Setting) -> None:
    with setting.daemon.admin() as admin:
        last = admin.events(b"", -1).last
    asked = prompt(930, 3 * CHUNK_TOKENS)
    setting.generate([asked], CHUNK_TOKENS + 1, [None])
    with setting.daemon.admin() as admin:
        events = unpack_events(admin.events(b"", last).events)
    published = [token for event in events if event.kind == EventKind.STORED for token in ids_of(event.tokens)]
    assert published == asked, "of the prompt alone, unless decoded chunks are asked for"


def test_routers_of_the_engine_get_the_pools_events(setting: Setting) -> None:
    asked = prompt(940, 3 * CHUNK_TOKENS + 1)
    blocks = 3 * CHUNK_TOKENS // BLOCK_TOKENS
    setting.generate([asked], 4, [None])

    with setting.router() as router:

        def count(medium: str) -> int:
            """The number of blocks of the prompt in a medium, as the router counts them after another step of the engine."""
            setting.engine.ask("generate", prompts=[prompt(941, 3)], tokens=2)
            router.catch_up("")
            return Index({medium: router.index.media.get(medium, {})}).longest(asked, BLOCK_TOKENS)

        wait_until(lambda: count("CPU") == blocks, "the router knows that the pool has the prompt")
        assert count("GPU") == blocks
        with setting.daemon.admin() as admin:
            admin.flush(None, None)
        wait_until(lambda: count("CPU") == 0, "the router knows that the pool has dropped it")
        assert count("GPU") == blocks
