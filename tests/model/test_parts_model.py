"""Long requests of many connections over both tiers, their parts interleaved at random with other operations.

Bytes derive from keys; after every few steps the pool recounts itself, and nothing may fail in the event loop.
"""

import asyncio
import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.clock import MonotonicClock
from kvpool.config.config import load_config
from kvpool.errors import KVPoolError
from kvpool.ids import KEY_BYTES, ConnectionId
from kvpool.index.parts import PART_CHUNKS
from kvpool.pool.pool import Pool
from kvpool.protocol.records import messages as m
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import Level, SaveState

LAYOUT = kv.Layout(layers=1, kv_heads=1, head_dim=16, dtype="float16", chunk_tokens=64)
CHUNK = LAYOUT.chunk_bytes
DROPPED = 255  # the level of a chunk that was dropped while it is leased
LONGEST = 5 * PART_CHUNKS
DRAM_CHUNKS, SSD_CHUNKS = 2 * LONGEST // 3, 4 * LONGEST
CONNECTIONS, PROMPTS, BRANCHES = 6, 4, 3
SECONDS = 4.0
STEPS_PER_CHECK = 200


def key_of(prompt: int, branch: int, number: int) -> bytes:
    """Prompts have their first half in common with their branches."""
    named = struct.pack("<3q", prompt, branch if number >= LONGEST // 2 else -1, number)
    key: bytes = kvpool_native.blake3(named)
    return key


def payload(key: bytes) -> bytes:
    return key * (CHUNK // KEY_BYTES)


class World:
    """The pool, its memory as a client sees it, and the source of randomness."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        options = (
            f"dram.capacity={DRAM_CHUNKS * CHUNK}B",
            f"dram.max_chunks={DRAM_CHUNKS}",
            "dram.prefault=false",
            "dram.announced_ttl=1s",
            "server.reservation_ttl=500ms",
            "server.lease_ttl=1s",
            f"ssd.path={folder}",
            "ssd.create=true",
            f"ssd.capacity={SSD_CHUNKS * (CHUNK + 4096)}B",
            "ssd.segment=1MiB",
            "ssd.write_through=true",
        )
        self.pool = Pool(load_config(None, list(options)), MonotonicClock())
        self.arena = mmap.mmap(self.pool.fds()[0], self.pool.geometry.arena_bytes)
        self.spoilt: set[int] = set()
        self.tasks: list[asyncio.Future[Any]] = []
        self.connections = 0
        self.checked = 0

    def chain(self) -> list[bytes]:
        prompt, branch = self.random.randrange(PROMPTS), self.random.randrange(BRANCHES)
        length = self.random.choice(
            [self.random.randrange(1, LONGEST), self.random.randrange(1, 2 * PART_CHUNKS), LONGEST]
        )
        return [key_of(prompt, branch, number) for number in range(length)]


class Client:
    """One connection: at most one request under way, of which `step` serves a part."""

    def __init__(self, world: World) -> None:
        self.world, self.pool, self.random = world, world.pool, world.random
        world.connections += 1
        self.session = self.pool.open_session(ConnectionId(world.connections), "model", LAYOUT)
        self._parts: Any = None
        self._waiting: asyncio.Future[Any] | None = None
        self._then: Callable[[Any], None] = lambda _: None
        self._leases: list[tuple[int, list[bytes]]] = []
        self._saves: list[tuple[m.Reserved, list[bytes]]] = []

    def step(self) -> None:
        if self._waiting is not None:
            if not self._waiting.done():
                return None
            self._waiting = None
        if self._parts is None:
            return self._begin()
        try:
            awaited = next(self._parts)
        except StopIteration as end:
            self._parts = None
            return self._then(end.value)
        except KVPoolError:
            self._parts = None
            return None
        self._waiting = None if awaited is None else asyncio.ensure_future(awaited)
        return None

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._parts is not None:
            self._parts.close()
        self.pool.drop_connection(self.session.connection)

    def _serve(self, parts: Any, then: Callable[[Any], None] = lambda _: None) -> None:
        self._parts, self._then = parts, then

    def _begin(self) -> None:
        chance, keys = self.random.random(), self.world.chain()
        column = b"".join(keys)
        if self._leases and chance < 0.25:
            lease, held = self._leases.pop(self.random.randrange(len(self._leases)))
            self._check(lease, held)
            self.pool.leases.release(self.session, lease)
        elif self._saves and chance < 0.55:
            self._publish(*self._saves.pop())
        elif chance < 0.65:
            self._serve(
                self.pool.chains.reserve(self.session, reserve_chain(b"", column)),
                lambda made: self._reserved(made, keys),
            )
        elif chance < 0.88:
            self._serve(self.pool.chains.acquire(self.session, m.Acquire(column)), lambda got: self._leased(got, keys))
        elif chance < 0.92:
            self._serve(self.pool.hints.announce(self.session, m.Announce(column)))
        elif chance < 0.95:
            priorities = bytes(self.random.choice([0, 35, 70]) for _ in keys)
            self._serve(self.pool.hints.retain(self.session, m.Retain(column, priorities, bytes(4 * len(keys)))))
        elif chance < 0.97:
            self._serve(self.pool.hints.demote(self.session, m.Demote(column, self.random.randrange(len(keys)))))
        elif self._leases:
            self._spoil(self.random.choice(self._leases)[0])

    def _reserved(self, made: m.Reserved, keys: list[bytes]) -> None:
        assert len(made.states) == len(keys)
        if made.reservation:
            self._saves.append((made, keys))

    def _publish(self, made: m.Reserved, keys: list[bytes]) -> None:
        if self.random.random() < 0.15:
            return self._serve(self.pool.chains.end_reservation(self.session, made.reservation))
        sums = []
        for number, state in enumerate(made.states):
            if state == SaveState.RESERVED:
                (offset,) = struct.unpack_from("<Q", made.offsets, 8 * number)
                data = payload(keys[number])
                self.world.arena[offset : offset + CHUNK] = data
                sums.append(struct.pack("<I", kvpool_native.crc32c(np.frombuffer(data, np.uint8))))
        return self._serve(self.pool.chains.commit(self.session, m.Commit(made.reservation, b"".join(sums), b"")))

    def _leased(self, leased: m.Leased, keys: list[bytes]) -> None:
        assert DROPPED not in leased.tiers
        if leased.lease:
            self._leases.append((leased.lease, keys))
            self._check(leased.lease, keys)

    def _check(self, number: int, keys: list[bytes]) -> None:
        """Every landed chunk of the lease has the bytes of its key, unless this test has damaged them."""
        lease = self.pool._readers.find(self.session, number)
        if lease is None:
            return
        ((hold,),) = lease.holds.values()
        slots = self.pool._directory.columns([hold])
        assert len(slots.levels) == lease.chunks
        for chunk in range(lease.chunks):
            offset, generation = (
                struct.unpack_from("<Q", each, 8 * chunk)[0] for each in (slots.offsets, slots.generations)
            )
            if slots.levels[chunk] == Level.DRAM and generation not in self.world.spoilt:
                assert self.world.arena[offset : offset + CHUNK] == payload(keys[chunk]), (
                    f"wrong bytes in chunk {chunk}"
                )
                self.world.checked += 1

    def _spoil(self, number: int) -> None:
        """Damage a leased chunk and report it, or send another connection's verdict about it."""
        lease = self.pool._readers.find(self.session, number)
        if lease is None:
            return
        ((hold,),) = lease.holds.values()
        slots = self.pool._directory.columns([hold])
        chunk = self.random.randrange(lease.chunks)
        if slots.levels[chunk] != Level.DRAM:
            return
        offset, generation = (
            struct.unpack_from("<Q", each, 8 * chunk)[0] for each in (slots.offsets, slots.generations)
        )
        if self.random.random() < 0.5:
            self.pool._directory.drop(self.pool._directory.key_of(hold, chunk), generation)
            return
        self.world.arena[offset : offset + 8] = b"spoilt!!"
        self.world.spoilt.add(generation)
        checking = self.pool.leases.check_reported(self.session, m.ReportCorrupt(number, chunk))
        self.world.tasks.append(asyncio.ensure_future(checking))


def _advance(world: World, order: Any) -> bool:
    """Serve another part of an operator's order, or wait. True if there may be more."""
    awaited = next(order, None)
    if awaited is not None:
        world.tasks.append(asyncio.ensure_future(awaited))
    return order.gi_frame is not None


async def _play(folder: Path, seed: int) -> int:
    world = World(folder, seed)
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context)))
    await world.pool.start()
    clients = [Client(world) for _ in range(CONNECTIONS)]
    orders: list[Any] = []
    end_s, steps = time.monotonic() + SECONDS, 0
    while time.monotonic() < end_s:
        steps += 1
        which, chance = world.random.randrange(CONNECTIONS), world.random.random()
        if chance < 0.0015:
            clients[which].close()
            clients[which] = Client(world)
        elif chance < 0.0025:
            age_s, tier = world.random.choice([None, 0.05, 0.5]), world.random.choice(["", "dram", "ssd"])
            orders.append(world.pool.flush(None, age_s, tier))
        elif chance < 0.2 and orders:
            orders = [order for order in orders if _advance(world, order)]
        else:
            clients[which].step()
        if world.random.random() < 0.3:
            await asyncio.sleep(0)
        if steps % STEPS_PER_CHECK == 0:
            await asyncio.sleep(0.002)  # I/O threads get a core too
            assert world.pool.verify()["problems"] == []
    await asyncio.gather(*world.tasks)
    for client in clients:
        client.close()
    (link,) = world.pool._tiering.lower
    while (
        world.pool._readers.has_backlog or world.pool._writers.has_backlog or len(link.promotions) + len(link.demotions)
    ):
        await asyncio.sleep(0.001)
    assert world.pool.verify()["problems"] == []
    left = world.pool.measure({}).directory
    assert (left["holds"], left["writing"], left["zombies"]) == (0, 0, 0)
    assert failures == []
    await world.pool.stop()
    return world.checked


@pytest.mark.slow
def test_bytes_and_counts_are_right_with_any_operation_between_two_parts(tmp_path: Path) -> None:
    seed = int(os.environ.get("KVPOOL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVPOOL_SEED={seed}")
    folder = tmp_path / "ssd"
    folder.mkdir(mode=0o700)
    checked = asyncio.run(_play(folder, seed))
    print(f"{checked} chunks checked")
    assert checked > 0
