"""One engine of the campaign: it saves, loads, retains, flushes and aborts at random, and writes its ledger.

    python -m tests.faults.rigs.kept.engine SOCKET LEDGER NUMBER SEED

Obeys letters on stdin: g for go, p for pause (answered by `paused` when what was under way has ended). It ends with its input,
with exit code 0. A byte that is wrong goes into the ledger. Whatever the daemon does, nothing may raise.
"""

import os
import random
import select
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvpool_client as kv
from kvpool.errors import KVPoolError
from kvpool.protocol.blocking import BlockingConnection
from tests.faults.rigs.kept.ledger import Ledger
from tests.faults.rigs.kept.prompts import CHAIN, REVISION, SETS, Prompts, prompts_of, wrong_chunks
from tests.rigs.payload import payload_of
from tests.rigs.sets import names_of, store_set

# Longer than any answer takes beside other load: an answer that is late would leave a save of which nobody knows.
TIMEOUT_S = 20.0
# Between layers of a slow save, and between a lease and its load.
PAUSE_S_MAX = 0.02
AWAY_PAUSE_S = 0.002
GO, PAUSE = b"g", b"p"
# Priorities of which this is a divisor end soon, and others not while a campaign runs.
BRIEF, BRIEF_S, LASTING_S = 3, 0.2, 100_000.0


class Engine:
    """One Pool for each of its models."""

    def __init__(self, socket: str, ledger: Ledger, number: int, seed: int) -> None:
        self._socket = socket
        self._ledger = ledger
        self._dice = random.Random(seed)
        self._pools = {
            prompts: kv.connect(
                socket, model=prompts.model, revision=REVISION, layout=prompts.layout, timeout_s=TIMEOUT_S
            )
            for prompts in prompts_of(number)
        }
        self._noise = np.full(CHAIN * max(prompts.layout.chunk_bytes for prompts in self._pools), 0x5A, np.uint8)
        self._steps: dict[Callable[[Prompts, kv.Pool], None], int] = {
            self._save: 40,
            self._save_slowly: 10,
            self._load: 20,
            self._load_slowly: 5,
            self._retain: 10,
            self._abort: 10,
            self._flush: 2,
        }

    def run(self) -> None:
        """Until stdin ends."""
        while self._obey():
            prompts, pool = self._dice.choice(list(self._pools.items()))
            if not pool.connected:
                _pause(AWAY_PAUSE_S)
            (step,) = self._dice.choices(list(self._steps), list(self._steps.values()))
            step(prompts, pool)

    def close(self) -> None:
        """End the connections."""
        for pool in self._pools.values():
            pool.close()

    def _obey(self) -> bool:
        """Follow what was asked; whether to go on."""
        is_paused = False
        while is_paused or select.select([sys.stdin], [], [], 0.0)[0]:
            word = os.read(sys.stdin.fileno(), 1)  # not through a buffer, into which `select` does not look
            if not word:
                return False
            if word == PAUSE:
                print("paused", flush=True)
            is_paused = word == PAUSE
        return True

    def _number(self, prompts: Prompts) -> int:
        return self._dice.randrange(prompts.count)

    def _save(self, prompts: Prompts, pool: kv.Pool) -> None:
        number = self._number(prompts)
        if prompts.model == SETS:
            self._ledger.note("B", prompts.model, number)
            self._acknowledge(prompts, number, store_set(pool, names_of(number)))
            return
        keys = prompts.keys(pool, number, self._dice.randint(1, CHAIN))
        payload = payload_of(keys, prompts.layout)
        self._ledger.note("B", prompts.model, number)
        self._acknowledge(prompts, number, pool.save(keys, from_=payload).commit())

    def _save_slowly(self, prompts: Prompts, pool: kv.Pool) -> None:
        """Layer by layer: a kill finds slots half written, and a writer that goes on."""
        if prompts.model == SETS:
            return
        number = self._number(prompts)
        keys = prompts.keys(pool, number)
        payload = payload_of(keys, prompts.layout)
        self._ledger.note("B", prompts.model, number)
        with pool.save(keys, from_=payload) as save:
            for layer in range(prompts.layout.layers):
                save.layer(layer)
                _pause(self._dice.uniform(0.0, PAUSE_S_MAX))
            self._acknowledge(prompts, number, save.commit())

    def _acknowledge(self, prompts: Prompts, number: int, result: kv.SaveResult) -> None:
        states = [state in ("stored", "present") for state in result.states]
        leading = states.index(False) if False in states else len(states)
        if leading:
            self._ledger.note("S", prompts.model, number, leading)

    def _load(self, prompts: Prompts, pool: kv.Pool) -> None:
        number = self._number(prompts)
        _, wrong = prompts.load(pool, number)
        self._blame(prompts, number, wrong)

    def _load_slowly(self, prompts: Prompts, pool: kv.Pool) -> None:
        """Some time after it was leased: in another life perhaps, in which the slots have other chunks."""
        if prompts.model == SETS:
            return
        number = self._number(prompts)
        keys = prompts.keys(pool, number)
        with pool.acquire(pool.lookup(keys)) as lease:
            _pause(self._dice.uniform(0.0, PAUSE_S_MAX))
            into = np.zeros((lease.chunks, prompts.layout.chunk_bytes), np.uint8)
            result = pool.load(lease, into=into).wait()
        self._blame(prompts, number, wrong_chunks(keys, into[: result.chunks]))

    def _blame(self, prompts: Prompts, number: int, wrong: int) -> None:
        if wrong:
            self._ledger.note("W", prompts.model, number, wrong)

    def _retain(self, prompts: Prompts, pool: kv.Pool) -> None:
        if prompts.model != SETS:
            keys = prompts.keys(pool, self._number(prompts), self._dice.randint(1, CHAIN))
            priority = self._dice.randrange(101)
            duration_s = self._dice.choice([None, LASTING_S]) if priority % BRIEF else BRIEF_S
            pool.retain(keys, [kv.TokenRange(0, None, priority, duration_s)])

    def _abort(self, prompts: Prompts, pool: kv.Pool) -> None:
        """A save of what nobody has, of bytes that are nobody's, which is never committed."""
        if prompts.model == SETS:
            return
        layout = prompts.layout
        keys = pool.keys(np.arange(layout.chunk_tokens * CHAIN) + self._dice.randrange(1 << 20))
        self._ledger.note("A", prompts.model)
        with pool.save(keys, from_=self._noise[: CHAIN * layout.chunk_bytes].reshape(CHAIN, -1)) as save:
            for layer in range(layout.layers):
                save.layer(layer)
                _pause(self._dice.uniform(0.0, PAUSE_S_MAX / layout.layers))

    def _flush(self, prompts: Prompts, pool: kv.Pool) -> None:
        """All of a model that nobody else saves; of the one that is there for long rarely."""
        if prompts.owner is None or (prompts.model.startswith("own") and self._dice.random() < 0.8):
            return
        self._ledger.note("F", prompts.model)
        try:
            with BlockingConnection.admin(self._socket, TIMEOUT_S) as admin:
                report = admin.flush(pool.model, None)
        except (KVPoolError, OSError):
            return
        if report["durable"] and not report["skipped"]:
            self._ledger.note("E", prompts.model)


def _pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def main() -> None:
    """See the module."""
    socket, ledger, number, seed = sys.argv[1:]
    engine = Engine(socket, Ledger(Path(ledger)), int(number), int(seed))
    try:
        engine.run()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
