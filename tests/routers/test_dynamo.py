"""Dynamo's indexer finds of a prompt what a lookup finds: through forks, evictions, media, salts, adapters, restarts.

By whole chunks it is the same number of tokens. By blocks it may be up to a chunk less a block more, where a prompt forks
inside a chunk that another prompt has, and is never less.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.keys import salt_tag
from tests.rigs.daemon import Daemon, Start, wait_connected, wait_until
from tests.rigs.events.publishing import local_events
from tests.rigs.payload import store
from tests.routers.dynamo import PYTHON, DynamoIndexer

pytestmark = pytest.mark.skipif(not PYTHON, reason="KVPOOL_ROUTERS names no Python with Dynamo (make test-routers)")
# Chunks of 128 KiB: the smallest disk tier has room for about 120.
LAYOUT = kv.Layout(layers=8, kv_heads=2, head_dim=64, dtype="float16", chunk_tokens=32)
CHUNK, BLOCK = LAYOUT.chunk_tokens, 8
MODEL = "test-model"
SCOPES = (("", b""), ("sql-lora", b""), ("", b"a tenant's salt"), ("sql-lora", b"another salt"))


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what else distinguishes them."""

    tokens: tuple[int, ...]
    adapter: str
    salt: bytes


class Prompts:
    """Prompts of which most begin like an earlier one, up to any token of it."""

    def __init__(self, seed: int, scopes: Sequence[tuple[str, bytes]] = SCOPES) -> None:
        self._random = random.Random(seed)
        self._scopes = scopes
        self.all: list[Prompt] = []

    def draw(self) -> Prompt:
        """Another one, of one to six chunks."""
        chance = self._random
        older = chance.choice(self.all) if self.all and chance.random() < 0.7 else None
        adapter, salt = (older.adapter, older.salt) if older and chance.random() < 0.8 else chance.choice(self._scopes)
        begin = older.tokens[: chance.randrange(len(older.tokens))] if older else ()
        size = max(len(begin) // CHUNK + 1, chance.randrange(1, 7)) * CHUNK
        rest = tuple(chance.randrange(50_000) for _ in range(size - len(begin)))
        self.all.append(Prompt(begin + rest, adapter, salt))
        return self.all[-1]


class Reader:
    """Dynamo's indexer beside the pool whose events it reads."""

    def __init__(
        self, indexer: DynamoIndexer, pool: kv.Pool, block_tokens: int, model: str = MODEL, *, worker: int = 1
    ) -> None:
        self._indexer = indexer
        self._worker = worker
        self._pool = pool
        self._block_tokens = block_tokens
        self._model = model

    def wait_right(self, prompts: list[Prompt]) -> None:
        """Until it finds what a lookup does, of every prompt."""
        wait_until(lambda: not self.wrong(prompts), "Dynamo finds what a lookup does", 60.0)

    def wrong(self, prompts: list[Prompt]) -> list[tuple[int, int]]:
        """Tokens that it finds and tokens that a lookup does, of each prompt where these do not agree."""
        more = CHUNK - self._block_tokens
        found = [self._found(prompt) for prompt in prompts]
        return [(shown, stored) for shown, stored in found if not stored <= shown <= stored + more]

    def _found(self, prompt: Prompt) -> tuple[int, int]:
        tag = salt_tag(prompt.salt)
        keys = self._pool.keys(list(prompt.tokens), salt=prompt.salt, adapter=prompt.adapter)
        shown = self._indexer.overlap(prompt.tokens, self._model, prompt.adapter, tag, worker=self._worker)
        return shown, self._pool.lookup(keys).chunks * CHUNK


def save(pool: kv.Pool, prompt: Prompt) -> None:
    """Store a prompt; what finds no room is left out."""
    store(pool, pool.keys(list(prompt.tokens), salt=prompt.salt, adapter=prompt.adapter))


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[DynamoIndexer]:
    """A process of its own."""
    with DynamoIndexer(tmp_path) as made:
        yield made


@pytest.fixture
def publishing(start_daemon: Start, tmp_path: Path) -> Start:
    """Starts a daemon that publishes, with room for 60 chunks in DRAM and twice as many on disk."""

    def start(block_tokens: int, **options: str) -> Daemon:
        disk = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "16MiB"}
        room = {"dram__capacity": f"{60 * LAYOUT.chunk_bytes}", **disk}
        by = {"events__block_tokens": str(block_tokens % CHUNK)}
        daemon = start_daemon(**{**local_events(tmp_path), **room, **by, **options})
        daemon.wait_open()
        return daemon

    return start


@pytest.mark.parametrize("form", ["map", "positional"])
@pytest.mark.parametrize("block_tokens", [CHUNK, BLOCK])
def test_overlap_is_what_a_lookup_finds_through_forks_and_evictions(
    publishing: Start, indexer: DynamoIndexer, form: str, block_tokens: int, seed: int
) -> None:
    daemon = publishing(block_tokens, events__format=form)
    indexer.register(daemon, block_tokens)
    prompts = Prompts(seed)
    with daemon.connect(LAYOUT) as pool:
        reader = Reader(indexer, pool, block_tokens)
        for _ in range(8):
            for _ in range(10):
                save(pool, prompts.draw())
            reader.wait_right(prompts.all)
        assert daemon.stats()["evicted_chunks"] > 0


@pytest.mark.parametrize("block_tokens", [CHUNK, BLOCK])
def test_overlap_is_right_again_after_each_restart(
    publishing: Start, indexer: DynamoIndexer, block_tokens: int, seed: int
) -> None:
    """Ends and kills of the daemon; the chunks on disk come back."""
    daemon = publishing(block_tokens)
    indexer.register(daemon, block_tokens)
    prompts = Prompts(seed)
    with daemon.connect(LAYOUT) as pool:
        reader = Reader(indexer, pool, block_tokens)
        for is_killed in (False, True, False, True):
            for _ in range(12):
                save(pool, prompts.draw())
            reader.wait_right(prompts.all)
            if is_killed:
                daemon.kill()
            else:
                daemon.stop()
            daemon.start()
            wait_connected(pool)
            daemon.wait_open()
            reader.wait_right(prompts.all)


@pytest.mark.parametrize("block_tokens", [CHUNK, BLOCK])
def test_overlap_is_right_after_lost_messages(
    publishing: Start, indexer: DynamoIndexer, block_tokens: int, seed: int
) -> None:
    """It stands still while more is published than the daemon keeps for it, and more than the replay has."""
    daemon = publishing(
        block_tokens, events__queue_messages="8", events__replay_messages="4", events__republish_interval="1s"
    )
    indexer.register(daemon, block_tokens)
    prompts = Prompts(seed)
    with daemon.connect(LAYOUT) as pool:
        reader = Reader(indexer, pool, block_tokens)
        for _ in range(3):
            save(pool, prompts.draw())
            reader.wait_right(prompts.all)
            indexer.pause()
            for _ in range(40):
                save(pool, prompts.draw())
            indexer.resume()
            save(pool, prompts.draw())
            reader.wait_right(prompts.all)


def test_overlap_is_right_for_two_models_with_endpoints_of_their_own(
    publishing: Start, indexer: DynamoIndexer, tmp_path: Path, seed: int
) -> None:
    names = ("one", "other")
    models = ", ".join(f"{name} ipc://{tmp_path}/{name} ipc://{tmp_path}/{name}-replay" for name in names)
    daemon = publishing(CHUNK, events__models=models)
    for number, name in enumerate(names):
        indexer.register(daemon, CHUNK, name, worker=1 + number)
    drawn = {name: Prompts(seed + number) for number, name in enumerate(names)}
    with daemon.connect(LAYOUT, model="one") as one, daemon.connect(LAYOUT, model="other") as other:
        for _ in range(4):
            for name, pool in (("one", one), ("other", other)):
                for _ in range(6):
                    save(pool, drawn[name].draw())
            for number, (name, pool) in enumerate((("one", one), ("other", other))):
                Reader(indexer, pool, CHUNK, name, worker=1 + number).wait_right(drawn[name].all)
