"""A bad network between two hosts: a proxy that delays, trickles, stalls, cuts, and changes bytes.

Stands between two namespaces, with a cable to each: for the one host it has the other's address, and so both ways. What it
does to new and to existing connections is the `Weather` of their port and direction, which the test changes at any time.
"""

import asyncio
import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.rigs.nodes.namespaces import Host

PIECE_BYTES = 16 << 10
LOOK_S = 0.005


@dataclass
class Weather:
    """State of a port. `delay_s`: before each piece. `bytes_per_s`: of all connections; 0: no bound. `cut_after` and
    `flip_at`: so many bytes of answers, and the connection is cut, or the next byte is another one. `cut_chance` and
    `stall_chance`: of each piece; one that stalls does so for good."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_stalled: bool = False
    cut_after: int | None = None
    flip_at: int | None = None
    cut_chance: float = 0.0
    stall_chance: float = 0.0
    free_from_s: float = 0.0  # when the next byte may pass, on the proxy's clock


class _Cut(Exception):
    """The connection is to end."""


class Proxy:
    """See the module. A thread of its own, until the end of the block; `counts`: what it did."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead(self, near: Host, far: Host, ports: dict[int, Weather]) -> None:
        """Lead connections to these ports of `near`, which has the target's address, on from `far` to the target."""
        for port, weather in ports.items():
            self._do(self._listen(near, far, port, weather))

    def cut(self) -> None:
        """Cut every connection now."""

        async def cut() -> None:
            for task in self._tasks:
                task.cancel()

        self._do(cut())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _listen(self, near: Host, far: Host, port: int, weather: Weather) -> None:
        with near.entered():
            listening = socket.create_server((near.address, port))

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._serve(reader, writer, far, (near.address, port), weather))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._servers.append(await asyncio.start_server(begin, sock=listening, limit=PIECE_BYTES))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far: Host,
        target: tuple[str, int],
        weather: Weather,
    ) -> None:
        with far.entered():
            onward = socket.socket()
        onward.setblocking(False)
        writers = [writer]
        try:
            await self._loop.sock_connect(onward, target)
            answers, requests = await asyncio.open_connection(sock=onward, limit=PIECE_BYTES)
            writers.append(requests)
            self.counts["connections"] += 1
            pumps = (self._pump(reader, requests, weather), self._pump(answers, writer, weather, is_answer=True))
            ways = [self._loop.create_task(pump) for pump in pumps]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            onward.close()  # the target is not there
        finally:
            for one in writers:
                one.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        weather: Weather,
        *,
        is_answer: bool = False,
    ) -> None:
        passed, is_lost = 0, False
        with contextlib.suppress(_Cut, OSError):
            while piece := await reader.read(PIECE_BYTES):
                is_lost = is_lost or self._random.random() < weather.stall_chance
                self.counts["stalled"] += is_lost
                while weather.is_stalled or is_lost:
                    await asyncio.sleep(LOOK_S)
                if weather.delay_s:
                    await asyncio.sleep(weather.delay_s)
                if is_answer:
                    piece = self._spoil(piece, passed, weather)
                passed += len(piece)
                await self._pass(piece, writer, weather)

    def _spoil(self, piece: bytes, passed: int, weather: Weather) -> bytes:
        """The piece as it goes on. `passed`: bytes before it. Raises _Cut."""
        if weather.cut_after is not None and passed + len(piece) > weather.cut_after:
            self.counts["cut"] += 1
            raise _Cut
        if self._random.random() < weather.cut_chance:
            self.counts["cut"] += 1
            raise _Cut
        if weather.flip_at is None or not passed <= weather.flip_at < passed + len(piece):
            return piece
        self.counts["flipped"] += 1
        changed = bytearray(piece)
        changed[weather.flip_at - passed] ^= 0x10
        return bytes(changed)

    async def _pass(self, piece: bytes, writer: asyncio.StreamWriter, weather: Weather) -> None:
        size = max(1, int(weather.bytes_per_s / 50)) if weather.bytes_per_s else len(piece)
        for first in range(0, len(piece), size):
            part = piece[first : first + size]
            if weather.bytes_per_s:
                now_s = self._loop.time()
                weather.free_from_s = max(now_s, weather.free_from_s) + len(part) / weather.bytes_per_s
                await asyncio.sleep(weather.free_from_s - now_s)
            writer.write(part)
            self.counts["passed_bytes"] += len(part)
            await writer.drain()
