"""A pool without a daemon, whose clock the test moves: engines that write the arena in place, each its share of every chunk.

A payload derives from the chunk's key, the layer and the head group, so that whoever reads an extent can recognise a wrong one.
"""

import functools
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import kvpool_client as kv
import kvpool_native
from kvpool.config.config import load_config
from kvpool.ids import ConnectionId
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.rigs.clock import HandClock
from tests.rigs.parts import served
from tests.rigs.reserve_requests import reserve_share
from tests.rigs.runs.in_setting import Test, in_setting

LAYOUT = kv.Layout(layers=2, kv_heads=8, head_dim=16, dtype="float16", chunk_tokens=32, head_groups=8)
WHOLE = kv.Share.whole(LAYOUT)
TTL_NS = 1_000_000_000
CAPACITY = "2MiB"


@dataclass(eq=False)
class PartSave:
    """A save under way: what `reserve` answered, and of which chunks the extents are to be written."""

    session: EngineSession
    share: kv.Share
    keys: KeyColumn
    answer: m.Reserved
    written: list[tuple[bytes, int, int]] = field(
        default_factory=list
    )  # key, offset and generation of the reserved chunks
    committed: int = 0

    def __post_init__(self) -> None:
        offsets = np.frombuffer(self.answer.offsets, "<u8").tolist()
        generations = np.frombuffer(self.answer.generations, "<u8").tolist()
        rows = zip(self.keys, self.answer.states, offsets, generations, strict=True)
        self.written = [(key, at, generation) for key, state, at, generation in rows if state == SaveState.RESERVED]

    @property
    def states(self) -> list[SaveState]:
        return [SaveState(state) for state in self.answer.states]

    @property
    def left(self) -> list[tuple[bytes, int, int]]:
        """Chunks that are not committed."""
        return self.written[self.committed :]


@functools.lru_cache(maxsize=4096)
def payload(key: bytes, extent: int) -> np.ndarray:
    """What an extent of a chunk must have."""
    seed = int.from_bytes(hashlib.blake2b(key + bytes([extent]), digest_size=8).digest(), "little")
    found = np.zeros(LAYOUT.extent_bytes, np.uint8)
    found[: LAYOUT.payload_bytes] = np.random.default_rng(seed).integers(0, 256, LAYOUT.payload_bytes, np.uint8)
    found.setflags(write=False)
    return found


def chain_of(path: str) -> KeyColumn:
    """The keys of a path: equal beginnings have equal keys."""
    return KeyColumn.of(hashlib.sha256(path[:end].encode()).digest() for end in range(1, len(path) + 1))


class JointPool:
    """See the module."""

    def __init__(self, **options: str) -> None:
        chosen = {
            "dram.capacity": CAPACITY,
            "dram.prefault": "false",
            "dram.connection_quota": "1.0",
            "server.user_quota": "1.0",
            "server.reservation_ttl": "1s",
            **options,
        }
        self.clock = HandClock()
        self.pool = Pool(load_config(None, [f"{name}={value}" for name, value in chosen.items()]), self.clock)
        self._last = 0
        self.arena = self.pool.memory.arena.view()

    def connect(self, layout: kv.Layout = LAYOUT, model: str = "model", user: int | None = None) -> EngineSession:
        """A further engine, of a user where one is named."""
        self._last += 1
        return self.pool.open_session(ConnectionId(self._last), model, layout, user)

    def drop(self, session: EngineSession, *, is_settled: bool = True) -> None:
        """An engine's connection ends; what it had ends with it, now or by and by."""
        self.pool.drop_connection(session.connection)
        if is_settled:
            self.settle()

    def settle(self) -> None:
        """End everything that has ended or expired."""
        while self.pool._writers.has_backlog:
            self.pool._writers.end_more(self.clock.ns)

    def reserve(
        self,
        session: EngineSession,
        share: kv.Share,
        path: str,
        first: int = 0,
        retention: tuple[bytes, bytes] = (b"", b""),
    ) -> PartSave:
        """Reserve a share of the chunks of a path from `first` on; of all of a chunk as an engine without a share does."""
        keys = chain_of(path)
        parent, asked = keys.before(first), keys[first:]
        chains = self.pool.chains
        if share == WHOLE:
            answer = served(chains.reserve(session, reserve_chain(parent, asked.packed, *retention)))
        else:
            part = (share.first_layer, share.layers, share.first_group, share.groups)
            answer = served(chains.reserve(session, reserve_share(*part, parent, asked.packed, *retention)))
        return PartSave(session, share, asked, answer)

    def write(self, save: PartSave, chunk: tuple[bytes, int, int], *, garbage: bool = False) -> bytes:
        """Write a chunk's extents of a save; their checksums."""
        key, offset, _ = chunk
        sums = b""
        for extent in save.share.extents(LAYOUT):
            row = payload(key, extent)
            if garbage:
                row = row ^ np.uint8(0x55)
            at = offset + extent * LAYOUT.extent_bytes
            self.arena[at : at + LAYOUT.extent_bytes] = row
            sums += kvpool_native.crc32c(row).to_bytes(4, "little")
        return sums

    def commit(self, save: PartSave, count: int | None = None) -> list[SaveState]:
        """Write and commit the next chunks."""
        chosen = save.left[:count]
        sums = b"".join(self.write(save, chunk) for chunk in chosen)
        states = served(self.pool.chains.commit(save.session, m.Commit(save.answer.reservation, sums, b""))).states
        save.committed += len(chosen)
        return [SaveState(state) for state in states]

    def store(self, session: EngineSession, share: kv.Share, path: str) -> list[SaveState]:
        """Save a share of all chunks of a path: the state of each."""
        save = self.reserve(session, share, path)
        states = save.states
        if save.written:
            committed = iter(self.commit(save))
            states = [next(committed) if state == SaveState.RESERVED else state for state in states]
        return states

    def end(self, save: PartSave) -> None:
        """The writer gives up what it has not committed, and writes no longer."""
        served(self.pool.chains.end_reservation(save.session, save.answer.reservation))

    def pass_time(self, ns: int) -> None:
        """Let time pass, and what is due expire."""
        self.clock.ns += ns
        self.pool._writers.expire(self.clock.ns)

    def visible(self, session: EngineSession, path: str) -> int:
        """How many leading chunks can be leased. Fails where one of them has wrong bytes."""
        keys = chain_of(path)
        leased = served(self.pool.chains.acquire(session, m.Acquire(keys.packed)))
        if not leased.lease:
            return 0
        for key, offset in zip(keys, np.frombuffer(leased.offsets, "<u8").tolist(), strict=False):
            for extent in range(LAYOUT.extents):
                at = offset + extent * LAYOUT.extent_bytes
                found = self.arena[at : at + LAYOUT.extent_bytes]
                assert np.array_equal(found, payload(key, extent)), f"extent {extent} of {key.hex()[:8]} in {path}"
        self.pool.leases.release(session, leased.lease)
        return leased.chunks

    def counts(self) -> dict[str, int]:
        """Reservations, joint chunks and zombie slots."""
        measured = self.pool.measure({})
        index = measured.index
        return {
            "reservations": index["reservations"],
            "joint_chunks": index["joint_chunks"],
            "expired": index["joint_expired_chunks"],
            "writing": measured.directory["writing"],
            "zombies": measured.directory["zombies"],
        }

    def problems(self) -> list[str]:
        """Broken invariants."""
        found: list[str] = self.pool.verify()["problems"]
        return found


@asynccontextmanager
async def joint_pool(**options: str) -> AsyncIterator[JointPool]:
    """A pool, whose invariants hold at the end."""
    setting = JointPool(**options)
    await setting.pool.start()
    try:
        yield setting
        assert setting.problems() == []
    finally:
        await setting.pool.stop()


def in_joint_pool(**options: str) -> Callable[[Test], Test]:
    """Runs a test with such a pool."""
    return in_setting(partial(joint_pool, **options))
