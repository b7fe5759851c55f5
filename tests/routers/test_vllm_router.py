"""vLLM's router sends a prompt where a lookup finds most of it, and finds as much of it: through forks, evictions, restarts.

It takes messages of the empty topic alone, in maps; docs/events.md has the options.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, wait_connected, wait_until
from tests.rigs.payload import store
from tests.rigs.runs.ports import free_port
from tests.routers.vllm_router import PYTHON, VllmRouter

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="KVPOOL_ROUTERS names no Python with vllm-router (make test-routers)"
)
CHUNK = SMALL.chunk_tokens
BLOCK = 16
NAMES = ("one", "other")
ROOM_CHUNKS = 24


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[Callable[[str, int], Daemon]]:
    """Starts a daemon that publishes, with room for few chunks."""
    stack = ExitStack()

    def start(name: str, block_tokens: int) -> Daemon:
        (tmp_path / name).mkdir()
        options = {
            "events.publish": f"tcp://127.0.0.1:{free_port()}",  # it takes no other addresses
            "events.replay": f"tcp://127.0.0.1:{free_port()}",
            "events.insecure": "true",
            "events.topic": "",
            "events.block_tokens": str(block_tokens % CHUNK),
            "dram.capacity": f"{ROOM_CHUNKS * SMALL.chunk_bytes}B",
        }
        return stack.enter_context(Daemon(tmp_path / name, **options))

    with stack:
        yield start


def drawn(chance: random.Random, older: Sequence[list[int]]) -> list[int]:
    """A prompt that may begin like another one, up to any token of it."""
    begin = chance.choice(older) if older and chance.random() < 0.6 else []
    begin = begin[: chance.randrange(len(begin) + 1)]
    size = (len(begin) // CHUNK + chance.randrange(1, 5)) * CHUNK
    return begin + [chance.randrange(1, 50_000) for _ in range(size - len(begin))]


@pytest.mark.parametrize("block_tokens", [CHUNK, BLOCK])
def test_a_prompt_is_sent_where_most_of_it_is(
    tmp_path: Path, publishing: Callable[[str, int], Daemon], block_tokens: int, seed: int
) -> None:
    chance, prompts = random.Random(seed), list[list[int]]()
    daemons = {name: publishing(name, block_tokens) for name in NAMES}
    with (
        daemons["one"].connect() as one,
        daemons["other"].connect() as other,
    ):
        pools = dict(zip(NAMES, (one, other), strict=True))
        with VllmRouter(tmp_path, daemons, block_tokens) as router:

            def wrong() -> list[object]:
                return [fault for tokens in prompts if (fault := _fault(router, pools, tokens, block_tokens))]

            for turn in range(4):
                for _ in range(12):
                    prompts.append(drawn(chance, prompts))
                    pool = pools[chance.choice(NAMES)]
                    store(pool, pool.keys(prompts[-1]))
                wait_until(lambda: not wrong(), "it sends each prompt where most of it is", 60.0)
                if turn == 1:
                    daemons["one"].kill()
                    daemons["one"].start()
                    wait_connected(one)
            assert sum(daemon.stats()["evicted_chunks"] for daemon in daemons.values()) > 0


def _fault(router: VllmRouter, pools: dict[str, kv.Pool], tokens: list[int], block_tokens: int) -> object:
    """What is wrong with the choice for a prompt, if anything is: a token more has to be computed in any case."""
    stored = {name: pool.lookup(pool.keys(tokens)).chunks * CHUNK for name, pool in pools.items()}
    name, credited = router.chosen([*tokens, 1])
    more = CHUNK - block_tokens
    is_right = stored[name] + more >= max(stored.values()) and stored[name] <= credited <= stored[name] + more
    return None if is_right else (name, credited, stored)
