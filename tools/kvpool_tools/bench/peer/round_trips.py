"""`bench peer`, round trips: how many a lease of what another node has takes until its bytes are here, of two daemons.

Between them is a relay that holds everything back for half of a round trip, and the first bytes of a connection for a whole one
more: so long the real network takes to make one. What is taken without it is subtracted. The first pull is of a node that was
never asked: its daemon has just started, and knows by the other one's events what that has.

The relay has another loopback address with the owner's ports, and puts it in the place of the owner's in offers: a node
connects to no other host than the one that it asks.
Threads: the main one, and the relay's.
"""

import asyncio
import socket as sockets
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from types import TracebackType

import numpy as np

import kvpool_client as kv
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.protocol.blocking import BlockingConnection
from kvpool_tools.bench.daemon import MeasuredDaemon, own_daemon
from kvpool_tools.bench.lookup import connect, store_zeros
from kvpool_tools.bench.measure import latencies, median, spread

OWNER, RELAY = "127.0.0.1", "127.0.0.2"
LAYOUT = kv.Layout(layers=4, kv_heads=1, head_dim=16, dtype="uint8", chunk_tokens=64)
CHUNKS, PULLS = 32, 2
CAPACITY = 64 << 20
ROUND_TRIP_S = 0.05
STARTS, QUICK_STARTS = 5, 1
READ_BYTES = 64 << 10
# What is due later is passed on later.
ORDER_S = 1e-6
LINK_S, LOOK_S = 20.0, 0.02
SALT = b"bench"
FIRST, NEXT = "first pull of a node", "next pull of it"
FIRST_BAR = 2.0


def bench_round_trips(is_quick: bool, advance: Callable[[int], None]) -> list[dict[str, object]]:
    """Rows: the first pull, and the next one."""
    starts = QUICK_STARTS if is_quick else STARTS
    far: list[list[float]] = []
    near: list[list[float]] = []
    ports = _free_port(), _free_port()
    named = [f"peer.{name}=tcp://{OWNER}:{port}" for name, port in zip(("listen", "stream"), ports, strict=True)]
    with (
        own_daemon(CAPACITY, *named, "peer.name=bench-owner", "peer.shm=false") as owner,
        connect(owner, LAYOUT, salt=SALT) as pool,
    ):
        prompts = np.random.default_rng(5).integers(0, 50_000, (PULLS, CHUNKS * LAYOUT.chunk_tokens), dtype=np.int32)
        for prompt in prompts:
            store_zeros(pool, pool.keys(prompt))
        with _Relay(ports) as relay:
            for number in range(2 * starts):
                relay.delay_s = ROUND_TRIP_S / 2 if number % 2 else 0.0
                (far if relay.delay_s else near).append(_pulls_s(ports[0], prompts))
                advance(2 * starts)
    return [
        _row(name, [one[pull] for one in far], median([one[pull] for one in near]), bar)
        for pull, (name, bar) in enumerate(((FIRST, FIRST_BAR), (NEXT, None)))
    ]


def _pulls_s(port: int, prompts: "np.ndarray[tuple[int, int], np.dtype[np.int32]]") -> list[float]:
    """Seconds of one pull after the other, by a daemon that has just started."""
    options = (f"peer.listen=tcp://{OWNER}:{_free_port()}", f"peer.members={RELAY}:{port}", "peer.shm=false")
    with (
        own_daemon(CAPACITY, *options, f"peer.stream=tcp://{OWNER}:0") as here,
        connect(here, LAYOUT, salt=SALT) as pool,
    ):
        _wait_until_known(here)
        seconds = []
        for prompt in prompts:
            keys, into = pool.keys(prompt), np.empty((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
            begun_s = time.perf_counter()
            with pool.acquire(pool.lookup(keys)) as lease:
                loaded = pool.load(lease, into=into[: lease.chunks]).wait().chunks
            seconds.append(time.perf_counter() - begun_s)
            if loaded != CHUNKS:
                raise KVPoolError(
                    f"{loaded} of {CHUNKS} chunks came from the other daemon: the measured calls prove nothing"
                )
        return seconds


def _wait_until_known(daemon: MeasuredDaemon) -> None:
    deadline = Deadline(LINK_S)
    with BlockingConnection.admin(daemon.socket, LINK_S) as connection:
        while not any(peer["known_chunks"] == PULLS * CHUNKS for peer in connection.peers()["peers"]):
            if deadline.has_passed():
                raise KVPoolError(
                    f"two daemons on loopback do not know each other after {LINK_S:g} s: {connection.peers()}"
                )
            time.sleep(LOOK_S)


class _Relay:
    """Leads connections to these ports of its address on to the owner's. `delay_s`: of what arrives from now on."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.delay_s = 0.0
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._pumps: set[asyncio.Task[None]] = set()

    def __enter__(self) -> "_Relay":
        Thread(target=self._loop.run_forever, name="bench-relay", daemon=True).start()
        for port in self._ports:
            serving = asyncio.start_server(partial(self._lead, port), RELAY, port)
            asyncio.run_coroutine_threadsafe(serving, self._loop).result(LINK_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(LINK_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _lead(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(OWNER, port)
        for pump in (self._pump(reader, back, 2 * self.delay_s), self._pump(there, writer, 0.0)):
            self._pumps.add(asyncio.ensure_future(pump))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        """Pass all on in its order. `wait_s`: of the first bytes, beside the delay."""
        last_s = self._loop.time() + wait_s + self.delay_s
        while data := await reader.read(READ_BYTES):
            last_s = max(last_s + ORDER_S, self._loop.time() + self.delay_s)
            self._loop.call_at(last_s, writer.write, data.replace(OWNER.encode(), RELAY.encode()))
        self._loop.call_at(last_s + ORDER_S, writer.close)

    async def _cancel(self) -> None:
        for pump in self._pumps:
            pump.cancel()


def _free_port() -> int:
    with sockets.socket() as free:
        free.bind((OWNER, 0))
        return int(free.getsockname()[1])


def _row(name: str, taken_s: list[float], near_s: float, bar: float | None) -> dict[str, object]:
    trips = [(seconds - near_s) / ROUND_TRIP_S for seconds in taken_s]
    return latencies(
        f"{name}, {CHUNKS} chunks",
        taken_s,
        round_trip_ms=ROUND_TRIP_S * 1e3,
        near_us=round(near_s * 1e6, 1),
        round_trips=round(median(trips), 2),
        round_trips_spread=spread(trips),
        round_trips_bar=bar,
    )
