"""`bench turns`, requests: the parts in which a whole pool serves requests about the longest chain, and releases their holds.

The pool runs in this process, with room for two such chains of chunks without bytes to speak of, and without other requests: a
row has the CPU time of each part of one verb.
"""

import asyncio
import gc
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np

from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import KVPoolError
from kvpool.ids import CHECKSUM_BYTES, ConnectionId
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.layout import Layout
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import ReserveRun, RunForm, pack_runs, reserve_chain
from kvpool.states import SaveState

CHAIN = 16384
CHUNK = Layout(layers=1, kv_heads=1, head_dim=64, dtype="uint8", chunk_tokens=32)
KEPT_PRIORITY = 60

T = TypeVar("T")
Timed = Callable[[list[float], Callable[[], T]], T]


class Requests:
    """A pool, and the CPU seconds of every part it has served, by name. `timed`: calls a function and records its time."""

    def __init__(self, timed: Timed[object]) -> None:
        chunks = 2 * CHAIN
        options = (
            f"dram.capacity={chunks * CHUNK.chunk_bytes}B",
            f"dram.max_chunks={chunks}",
            "dram.prefault=false",
            "dram.connection_quota=1.0",
            "dram.announced_quota=1.0",
        )
        self.pool = Pool(load_config(None, list(options)), MonotonicClock())
        self._session = self.pool.open_session(ConnectionId(1), "model", CHUNK)
        self._timed = timed
        self.parts: dict[str, list[float]] = {}

    async def run(self) -> None:
        """Every verb that may be about a long chain, once or more."""
        session, chains, hints = self._session, self.pool.chains, self.pool.hints
        keys = [KeyColumn(np.random.default_rng(seed).bytes(packed_bytes(CHAIN))) for seed in range(3)]
        for number, chain in enumerate(keys):
            name = "reserve, new chunks" if number < 2 else "reserve, another goes for each"
            made = self._serve(name, chains.reserve(session, reserve_chain(b"", chain.packed)))
            if made.states != bytes([SaveState.RESERVED]) * CHAIN:
                raise KVPoolError("not every chunk of the longest chain was reserved: the measured parts prove nothing")
            self._serve(
                "commit", chains.commit(session, m.Commit(made.reservation, bytes(CHECKSUM_BYTES * CHAIN), b""))
            )
        # The following requests evict nothing, so that their parts record no evictions in the journal.
        last, retention = keys[2].packed, (bytes([KEPT_PRIORITY]) * CHAIN, bytes(4 * CHAIN))
        self._serve(
            "reserve, all there, with priorities", chains.reserve(session, reserve_chain(b"", last, *retention))
        )
        leased = self._serve("acquire", chains.acquire(session, m.Acquire(last)))
        if leased.chunks != CHAIN:
            raise KVPoolError(
                f"{leased.chunks} chunks of the longest chain were leased: the measured parts prove nothing"
            )
        self._note("drop_leases", lambda: self.pool.leases.release(session, leased.lease))
        some, count = keys[2][: m.RETAIN_KEYS_MAX].packed, m.RETAIN_KEYS_MAX
        self._serve("retain", hints.retain(session, m.Retain(some, bytes([KEPT_PRIORITY]) * count, bytes(4 * count))))
        self._serve("demote", hints.demote(session, m.Demote(last, CHAIN - count)))
        self._serve("announce", hints.announce(session, m.Announce(last)))
        made = self._serve(
            "reserve, another goes for each", chains.reserve(session, reserve_chain(b"", keys[0].packed))
        )
        await self._settle()
        self._serve("drop_reservations", chains.end_reservation(session, made.reservation))
        alone, count = np.random.default_rng(3).bytes(packed_bytes(m.SET_KEYS_MAX)), m.SET_KEYS_MAX
        runs = pack_runs([ReserveRun(0, RunForm.ALONE, count, None)])
        made = self._serve("reserve, a set", chains.reserve(session, m.Reserve(runs, alone)))
        sums = bytes(CHECKSUM_BYTES * count)
        self._serve("commit, a set", chains.commit(session, m.Commit(made.reservation, sums, b"")))
        leased = self._serve("acquire, a set", chains.acquire(session, m.Acquire(alone, set_of=1)))
        if leased.chunks != count:
            raise KVPoolError(
                f"{leased.chunks} chunks of the largest set were leased: the measured parts prove nothing"
            )
        self._note("drop_leases", lambda: self.pool.leases.release(session, leased.lease))

    async def _settle(self) -> None:
        """Run until the journal has recorded all changes."""
        last = -1
        while last != (last := self.pool.journal.stats()["events.written"]):
            await asyncio.sleep(0.01)

    def _serve(self, name: str, parts: Generator[Any, None, T]) -> T:
        answers: list[T] = []

        def serve() -> Generator[Any, None, None]:
            answers.append((yield from parts))

        turns = serve()
        is_over = object()
        while self._note(name, lambda: next(turns, is_over)) is not is_over:
            pass
        return answers[0]

    def _note(self, name: str, work: Callable[[], object]) -> object:
        return self._timed(self.parts.setdefault(name, []), work)


def request_parts(timed: Timed[object]) -> dict[str, list[float]]:
    """CPU seconds of each part, by name of the request."""

    async def run() -> dict[str, list[float]]:
        requests = Requests(timed)
        await requests.pool.start()
        gc.collect()
        await requests.run()
        problems = requests.pool.verify()["problems"]
        await requests.pool.stop()
        if problems:
            raise KVPoolError(f"the pool is broken: {problems[0]}")
        return requests.parts

    return asyncio.run(run())
