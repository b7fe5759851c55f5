"""Tools of the tests of the vLLM connector: scripted engines on a daemon, and short functions for their steps."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.clock import MonotonicClock
from kvpool_client.connection.promise_line import Question
from tests.rigs.clock import LaterClock
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.vllm import fake_vllm
from tests.rigs.vllm.engine import ScriptedEngine
from tests.rigs.vllm.request import BLOCK, Request

CHUNK = 2 * BLOCK
StartEngine = Callable[..., Any]


@pytest.fixture
def start(daemon: Daemon) -> Iterator[StartEngine]:
    """Starts engines on the test's daemon, of several groups of layers where it names their `windows`; at its end none of them
    has read a wrong byte."""
    engines: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(fake_vllm.installed())
        from kvpool_client.vllm import connector

        def start_engine(**options: Any) -> Any:
            save = "prompt" if "windows" in options else "all"
            arguments: dict[str, Any] = {"kvpool__load": "async", "kvpool__always_load": True, "kvpool__save": save}
            # No test fails where the machine has other things to do for some seconds.
            arguments.update({"kvpool__wait_s": 60.0, "kvpool__timeout_s": 60.0, **options})
            engine = ScriptedEngine(connector.KVPoolConnector, arguments.pop("socket", daemon.socket), **arguments)
            if engine.scheduler._scheduler is not None:
                engine.scheduler._scheduler._offers._clock = StillClock()
            stack.callback(engine.close)
            stack.callback(end_requests, engine)
            engines.append(engine)
            return engine

        yield start_engine
        assert [engine.wrong_reads for engine in engines] == [0] * len(engines)


def end_requests(engine: Any) -> None:
    """End those that a test has left in an engine: their tickets would hold chunks for long."""
    half = engine.scheduler._scheduler
    for entry in list(half._requests.values()) if half is not None else ():
        engine.scheduler.request_finished_all_groups(entry.request, ([],))


def prompt(first: int, count: int) -> list[int]:
    return [(first * 7919 + 31 * place) % 1000 for place in range(count)]


def counted(engine: Any, name: str) -> float:
    halves = [engine.scheduler._scheduler, *(worker._worker for worker in engine.workers)]
    total: float = sum(half.tally.totals.data.get(name, 0) for half in halves)
    return total


def ask(engine: Any, name: str, tokens: list[int], **more: Any) -> Request:
    """Run one request to its end with nothing in the engine's own cache; the request."""
    engine.forget()
    request = Request(name, list(tokens), **more)
    engine.run(request)
    return request


class StillClock(MonotonicClock):
    """Time that passes on command, and by a microsecond at each look: a step has all the time it needs for new requests, on the
    busiest machine too."""

    def __init__(self, command: LaterClock | None = None) -> None:
        self._command = command or LaterClock()
        self._looks = 0

    def now_ns(self) -> int:
        self._looks += 1
        return self._command.later_ns + 1000 * self._looks

    def advance(self, seconds: float) -> None:
        """So much time is over."""
        self._command.advance(seconds)


def later_clock(engine: ScriptedEngine) -> LaterClock:
    """A clock of the test's for what an engine waits from now on: for saves of others, for answers, for its own saves."""
    clock, half = LaterClock(), engine.scheduler._scheduler
    for waiting in (half, half._hits, *(worker._worker._saver for worker in engine.workers)):
        assert isinstance(waiting._clock, MonotonicClock)
        waiting._clock = clock
    half._offers._clock = StillClock(clock)
    return clock


def matched(engine: Any, request: Request, held_tokens: int = 0) -> tuple[int | None, bool]:
    """What the connector answers about a request of which vLLM holds so much."""
    answer: tuple[int | None, bool] = engine.scheduler.get_num_new_matched_tokens(request, held_tokens)
    return answer


def arrive_with_a_promise(engine: Any, request: Request, held_tokens: int = 0) -> None:
    """The next step takes the request up with a load."""
    engine.arrive(request)
    wait_until(lambda: matched(engine, request, held_tokens)[0] is not None, "the daemon has promised chunks")


def load_unreported(engine: Any, request: Request) -> None:
    """A step that takes the request up, and whose load has ended when it returns; the worker reports that with the next
    step."""
    arrive_with_a_promise(engine, request)
    half = engine.workers[0]._worker
    half.take_finished = set
    try:
        engine.step()
    finally:
        del half.take_finished
    ((_, future),) = half._running
    assert future.result(60.0).is_complete


def keys_of(engine: Any, tokens: list[int], rank: int = 0) -> kv.KeyChain:
    """The keys of a prompt's chunks on a rank."""
    pool = engine.workers[rank]._worker.pool
    keys: kv.KeyChain = pool.keys_from_hashes(Request("keys", tokens).block_hashes, BLOCK, salt=b"")
    return keys


def being_saved(engine: Any, tokens: list[int], first_chunk: int = 0) -> kv.Save:
    """Another engine's save of a prompt's chunks from one on, reserved and not committed."""
    pool, keys = engine.workers[0]._worker.pool, keys_of(engine, tokens)
    source = np.zeros((len(keys) - first_chunk, pool.layout.chunk_bytes), np.uint8)
    save: kv.Save = pool.save(keys, from_=source, first_chunk=first_chunk)
    return save


def corrupt(engine: Any, tokens: list[int], chunk: int, rank: int = 0, *, layer: int = 1) -> None:
    """Flip bits of a chunk of a prompt that a rank has stored; `layer`: -1 is its last one."""
    pool = engine.workers[rank]._worker.pool
    with pool.acquire(pool.lookup(keys_of(engine, tokens, rank))) as lease:
        arena = np.asarray(lease.hold.session.arena.view())
        begin = layer % pool.layout.layers * pool.layout.layer_bytes
        arena[int(lease.hold.rows.offsets[chunk]) + begin + 3] ^= 16


def flip_at_the_next_load(engine: Any, row: int) -> None:
    """Change a bit of a leased chunk in the arena when the first rank's next load begins."""
    memory = engine.workers[0]._worker._memory
    load = memory.load

    def spoiling(lease: Any, order: Any) -> Any:
        memory.load = load
        np.asarray(lease.hold.session.arena.view())[int(lease.hold.rows.offsets[row]) + 13] ^= 16
        return load(lease, order)

    memory.load = spoiling


def lose_next_lease(engine: ScriptedEngine, rank: int = 0) -> None:
    """Make the next ticket of this rank unknown; every chunk stays stored."""
    pool = engine.workers[rank]._worker.pool
    claim = pool.claim

    def lost(ticket: bytes) -> Any:
        pool.claim = claim
        claim(ticket).release()  # unclaimed it would hold its chunks until its time is over
        return claim(b"forged" + ticket)

    pool.claim = lost


class WithheldAnswers:
    """The promises that a scheduler asks for from now on, answered when the test says so, or never."""

    def __init__(self, engine: ScriptedEngine) -> None:
        half = engine.scheduler._scheduler
        self._line, self._clock = half._promise_line, half._offers._clock
        self._ask, self._receive = self._line.ask_promise, self._line.receive
        self._questions: list[Question] = []
        self._line.ask_promise, self._line.receive = self._note, self._wait

    @property
    def count(self) -> int:
        """How many were asked for."""
        return len(self._questions)

    def deliver(self) -> None:
        """The daemon answers all of them now."""
        asked = [self._ask(question.hit) for question in self._questions]

        def are_answered() -> bool:
            self._receive(0.01)
            return all(question.answer is not None for question in asked)

        wait_until(are_answered, f"{self.count} promises have come")
        for question, answered in zip(self._questions, asked, strict=True):
            question.answer, question.answered_ns = answered.answer, answered.answered_ns

    def end(self) -> None:
        """Answers come again to what is asked from now on."""
        self._line.ask_promise, self._line.receive = self._ask, self._receive

    def _wait(self, wait_s: float = 0.0) -> None:
        self._receive()
        self._clock.advance(wait_s)

    def _note(self, hit: kv.Hit) -> Question:
        self._questions.append(Question(hit, iter([(hit, None)])))  # type: ignore[list-item]  # it is never sent
        return self._questions[-1]


def withhold_answers(engine: ScriptedEngine) -> WithheldAnswers:
    return WithheldAnswers(engine)
