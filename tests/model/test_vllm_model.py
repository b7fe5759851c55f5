"""Two scripted vLLM engines on one daemon at random: whatever they load, save, preempt, abort and fail, no byte is wrong.

The engines themselves are the model: each knows what every byte of its KV must be, reads it layer by layer and counts what
is wrong (see `tests/rigs/vllm/engine.py`). Saves on their threads are held up and let on at random, so that blocks of requests
that are gone are wanted by others meanwhile.
"""

import random
import threading
from collections.abc import Iterator

import pytest

import kvpool_client as kv
from tests.rigs.daemon import Daemon, wait_until

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.vllm.worker.save_task import SaveTask
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, counted, start

__all__ = ["start"]
pytestmark = pytest.mark.torch

STEPS = 80
SAVES = [None, None, None, {"save": "all"}, {"save": False}, {"load": False}, {"decode_priority": 20}]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No save thread begins an order while it is cleared."""
    opened, begin = threading.Event(), SaveTask.open
    opened.set()

    def wait(task: SaveTask) -> None:
        if threading.current_thread().name.startswith("kvpool-save"):
            opened.wait(20.0)
        begin(task)

    monkeypatch.setattr(SaveTask, "open", wait)
    yield opened
    opened.set()


class Player:
    """One engine and what happens to it."""

    def __init__(self, engine: ScriptedEngine, chance: random.Random, bases: list[list[int]]) -> None:
        self.engine = engine
        self.prompts: list[tuple[list[int], str | None]] = []
        self.resets = 0
        self._chance = chance
        self._bases = bases

    def play(self) -> None:
        """One random operation, and a step."""
        moves = [self._arrive, self._arrive, self._preempt, self._abort, self._evict, self._fail, self._reset]
        if self._chance.random() < 0.6:
            self._chance.choice(moves)()
        self.engine.step()

    def _arrive(self) -> None:
        base = self._chance.choice(self._bases)
        tail = [self._chance.randrange(1000) for _ in range(self._chance.randrange(1, 3 * CHUNK))]
        tokens = base[: self._chance.randrange(len(base) + 1)] + tail
        salt = self._chance.choice([None, None, "tenant"])
        self.prompts.append((tokens, salt))
        self.engine.arrive(
            Request(
                f"{id(self)}-{len(self.prompts)}",
                list(tokens),
                new_tokens=self._chance.choice([1, 1, 2, CHUNK + 3]),
                cache_salt=salt,
                kv_transfer_params=self._chance.choice(SAVES),
            )
        )

    def _preempt(self) -> None:
        running = [request for request in self.engine.requests if request.state == "running"]
        if running:
            self.engine.preempt(self._chance.choice(running))

    def _abort(self) -> None:
        if self.engine.requests:
            self.engine.abort(self._chance.choice(self.engine.requests))

    def _evict(self) -> None:
        """The engine's own cache drops unused blocks."""
        blocks = self.engine.blocks
        in_use = {block for request in self.engine.requests for block in request.table}
        for value, block in list(blocks.local.items()):
            if block not in in_use:
                del blocks.local[value]
                blocks.give_back([block], overwrite=True)

    def _reset(self) -> None:
        """vLLM's `reset_prefix_cache(reset_running_requests=True)`: later requests overwrite every block."""
        if all(request.state in ("running", "waiting", "preempted") for request in self.engine.requests):
            for request in [each for each in self.engine.requests if each.state == "running"]:
                self.engine.preempt(request)
            self.resets += self.engine.blocks.reset_prefix_cache()

    def _fail(self) -> None:
        """Use up the ticket of a rank's next load."""
        pool = self._chance.choice(self.engine.workers)._worker.pool
        claim = type(pool).claim

        def lost(ticket: bytes) -> kv.Lease:
            del pool.claim
            claim(pool, ticket).release()
            return claim(pool, ticket)  # type: ignore[no-any-return]  # an engine of any kind

        pool.claim = lost


def options_of(chance: random.Random) -> dict[str, object]:
    """An engine of some kind."""
    return {
        "blocks": 2048,
        "budget": chance.choice([CHUNK, 3 * CHUNK, 4096]),
        "holds_blocks": chance.random() < 0.8,
        "is_speculative": chance.random() < 0.3,
        "kvpool__load": chance.choice(["async", "sync"]),
        "kvpool__save": chance.choice(["prompt", "all"]),
        "kvpool__save_after": chance.choice([1, 1, 2]),
        "kvpool__timeout_s": chance.choice([0.2, 5.0]),
        "kvpool__wait_s": chance.choice([0.0, 0.05]),
    }


def end(player: Player) -> None:
    """Run until every request has ended, with the connector's work after them."""
    engine = player.engine
    engine.step_until(lambda: not engine.requests, "the requests have ended", 60.0)
    engine.idle()
    assert not engine.blocks.held
    assert engine.wrong_reads == 0


@pytest.mark.slow
def test_no_byte_is_wrong_under_random_engine_operations(
    start: StartEngine, daemon: Daemon, gate: threading.Event, seed: int
) -> None:
    chance = random.Random(seed)
    bases = [[chance.randrange(1000) for _ in range(chance.randrange(1, 9) * CHUNK)] for _ in range(4)]
    ranks, replicas = chance.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
    players = [Player(start(ranks=ranks, replicas=replicas, **options_of(chance)), chance, bases) for _ in range(2)]
    for _ in range(STEPS):
        chance.choice(players).play()
        if chance.random() < 0.1:
            (gate.clear if gate.is_set() else gate.set)()
    gate.set()
    for player in players:
        end(player)
    wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["tickets"] == 0, "nothing is held")
    fresh = Player(start(ranks=ranks, replicas=replicas, blocks=4096), chance, bases)
    asked = [(tokens, salt) for player in players for tokens, salt in player.prompts]
    for number, (tokens, salt) in enumerate(asked):
        fresh.engine.arrive(Request(f"fresh-{number}", [*tokens, 1], cache_salt=salt))
    end(fresh)
    assert (
        counted(fresh.engine, "loaded_chunks") > 0 or sum(counted(each.engine, "saved_chunks") for each in players) == 0
    )
