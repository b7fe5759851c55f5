"""An engine that saves and loads at random while its daemon and its disk fail, and checks every byte it gets.

Runs in a thread of the test. A chain derives from its number, so that anybody can ask for it afterwards. A miss is always
allowed; a wrong byte is recorded as a problem and fails the test that ends the traffic.
"""

import random
import select
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

import kvpool_client as kv
from tests.rigs.daemon import SMALL, Daemon, wait_connected
from tests.rigs.payload import chunk_bytes_of, load_all, store, tokens_of

CHAIN = 6
# A client waits so long for one answer of the daemon.
TIMEOUT_S = 2.0
EVICTED_TURNS_MAX = 2


class WrongBytes(AssertionError):
    """A load brought other bytes than its keys': never expected, whatever else fails."""


def chain_of(pool: kv.Pool, number: int) -> kv.KeyChain:
    """The chain with this number."""
    return pool.keys(tokens_of(40_000 + number, CHAIN * SMALL.chunk_tokens))


@dataclass(slots=True)
class Tally:
    """Results of loads: chunks, and one line for each wrong one."""

    served: int = 0
    missed: int = 0
    wrong: list[str] = field(default_factory=list)

    def load(self, pool: kv.Pool, number: int) -> int:
        """Load a chain and compare all of it with its keys; how many chunks there were."""
        keys = chain_of(pool, number)
        result, into = load_all(pool, keys)
        for chunk in range(result.chunks):
            if not np.array_equal(into[chunk], chunk_bytes_of(keys[chunk], SMALL.chunk_bytes)):
                self.wrong.append(f"chunk {chunk} of chain {number}")
        self.served += result.chunks
        self.missed += len(keys) - result.chunks
        return result.chunks

    def __iadd__(self, other: "Tally") -> "Tally":
        self.served += other.served
        self.missed += other.missed
        self.wrong += other.wrong
        return self


def load_chains(daemon: Daemon, chains: int) -> Tally:
    """Ask a daemon for every chain; all bytes are right."""
    tally = Tally()
    with daemon.connect(timeout_s=TIMEOUT_S) as pool:
        wait_connected(pool)
        for number in range(chains):
            tally.load(pool, number)
    if tally.wrong:
        raise WrongBytes(tally.wrong)
    return tally


def fill(daemon: Daemon, chains: int) -> None:
    """Demote every chain, and leave none in DRAM."""
    with daemon.connect(timeout_s=10.0) as pool, daemon.admin() as admin:
        wait_connected(pool)
        for number in range(chains):
            store(pool, chain_of(pool, number))
        assert admin.demote_all(10.0)["left"] == 0
        admin.flush(None, None, "dram")


class Traffic:
    """Saves and loads of chains 0 to `chains`, until the block is left. Leaving it raises if any byte was wrong."""

    def __init__(self, daemon: Daemon, seed: int, *, chains: int) -> None:
        self._daemon = daemon
        self._dice = random.Random(seed)
        self._chains = chains
        self._is_ending = threading.Event()
        self._trace = ""
        self._thread = threading.Thread(target=self._run, name="traffic")
        self.tally = Tally()
        self.stored = 0

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending.set()
        self._thread.join()
        if error is None:
            assert self._trace == ""
            assert self.tally.wrong == []

    def _run(self) -> None:
        try:
            with self._daemon.connect(timeout_s=TIMEOUT_S) as pool:
                while not self._is_ending.is_set():
                    if not pool.connected:
                        select.select([], [], [], 0.005)
                        continue
                    number = self._dice.randrange(self._chains)
                    if self._dice.random() < 0.5:
                        self.stored += store(pool, chain_of(pool, number)).stored
                    else:
                        self.tally.load(pool, number)
        except BaseException:
            self._trace = traceback.format_exc()
            raise


class DramClient:
    """An engine whose chunks fit DRAM: whatever its disk does, each save and each load right after it is complete.

    Under `lru` that is: class queues may prefer what others have used often. A process that is stopped between the two for so
    long that others fill DRAM finds its chain evicted: that may happen EVICTED_TURNS_MAX times.
    """

    def __init__(self, daemon: Daemon, *, first_chain: int) -> None:
        self._pool = daemon.connect(model="dram-model", timeout_s=TIMEOUT_S)
        self._next = first_chain
        self.turns = 0
        self.evicted_turns = 0
        self.slowest_s = 0.0

    def __enter__(self) -> "DramClient":
        wait_connected(self._pool)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def turn(self) -> None:
        """Save a new chain and load it."""
        keys = chain_of(self._pool, self._next)
        self._next += 1
        started = time.monotonic()
        saved = store(self._pool, keys)
        assert (saved.stored, dict(saved.reasons)) == (CHAIN, {})
        tally = Tally()
        loaded = tally.load(self._pool, self._next - 1)
        assert tally.wrong == []
        self.evicted_turns += loaded < CHAIN
        assert self.evicted_turns <= EVICTED_TURNS_MAX, f"{loaded} of {CHAIN} chunks, saved just before"
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self.turns += 1
