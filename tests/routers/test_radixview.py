"""RadixView, a viewer of SGLang's KV events, has of kvpoold's stream the prefixes that the pool has, block by block.

It knows one medium a block, so that the pool here has one tier.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvpool_client as kv
from tests.rigs.daemon import Start, wait_until
from tests.rigs.events.publishing import local_events
from tests.routers.test_dynamo import BLOCK, CHUNK, LAYOUT, Prompts, save

PYTHON = os.environ.get("KVPOOL_ROUTERS", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="KVPOOL_ROUTERS names no Python with RadixView (make test-routers)")
PROGRAM = Path(__file__).with_name("radixview_program.py")
Prefix = tuple[int, ...]


class RadixView:
    """The program, which follows a daemon's events."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def prefixes(self) -> set[Prefix]:
        """The token ids of a prompt up to the end of each block."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        blocks = {name: (parent, tokens) for name, parent, tokens in json.loads(self._process.stdout.readline())}

        def prefix(name: str) -> Prefix:
            parent, tokens = blocks[name]
            return (*(prefix(parent) if parent else ()), *tokens)

        return set(map(prefix, blocks))


@pytest.fixture
def follow() -> Iterator[Callable[[str], RadixView]]:
    """Starts the program for an endpoint."""
    started: list[subprocess.Popen[str]] = []

    def start(endpoint: str) -> RadixView:
        pipes = subprocess.PIPE
        started.append(subprocess.Popen([PYTHON, str(PROGRAM), endpoint], stdin=pipes, stdout=pipes, text=True))
        return RadixView(started[-1])

    yield start
    for process in started:
        with process:
            process.kill()


def stored(pool: kv.Pool, block_tokens: int) -> set[Prefix]:
    """The same of what the pool has."""
    chunks = {chunk.key: chunk for part in pool.snapshot() for chunk in part.chunks}
    found: set[Prefix] = set()
    for chunk in chunks.values():
        parts, above = [chunk.tokens], chunk
        while above.parent:
            above = chunks[above.parent]
            parts.insert(0, above.tokens)
        ids = tuple(memoryview(b"".join(parts)).cast("i"))
        found |= {ids[:end] for end in range(len(ids) - CHUNK + block_tokens, len(ids) + 1, block_tokens)}
    return found


@pytest.mark.parametrize("form", ["map", "positional"])
@pytest.mark.parametrize("block_tokens", [CHUNK, BLOCK])
def test_its_tree_has_the_prefixes_of_the_pool(
    start_daemon: Start,
    follow: Callable[[str], RadixView],
    tmp_path: Path,
    form: str,
    block_tokens: int,
    seed: int,
) -> None:
    by = {"events__block_tokens": str(block_tokens % CHUNK), "events__format": form}
    daemon = start_daemon(dram__capacity=f"{60 * LAYOUT.chunk_bytes}", **local_events(tmp_path), **by)
    view = follow(daemon.info()["events"])
    prompts = Prompts(seed, scopes=(("", b""),))  # to it adapters and salts are nothing
    with daemon.connect(LAYOUT) as pool:
        for _ in range(6):
            for _ in range(8):
                save(pool, prompts.draw())
            wait_until(lambda: view.prefixes() == stored(pool, block_tokens), "it has what is stored", 60.0)
        assert int(daemon.stats()["evicted_chunks"]) > 0
