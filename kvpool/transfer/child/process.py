"""Child process as the daemon sees it: started, asked, watched, and started again after it has ended.

    STARTING ──it serves──► SERVING ──it ends, hangs or is closed──► ENDED ──back-off──► STARTING
        └──cannot use its library, or takes too long──► ENDED

Each life has memory of its own, which bytes pass through: what a library that is gone might still write lands in memory that
nobody reads. A request that has no answer for `hang_s` ends the process; every request is answered once, with None where its
process ended. Loop thread only; processes are started and waited for on other threads.
"""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.peers.back_off import BackOff, BackOffSettings, Uniform
from kvpool.transfer.child.frames import Frames, pack

log = logging.getLogger(__name__)

STOP_S = 5.0
# A life of this length was a good one: the next attempt begins at the shortest delay.
GOOD_LIFE_S = 60.0

Codes = list[int] | None
OnAnswer = Callable[[Codes], None]


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs a module of this package as a child."""
    return (sys.executable, "-m", module)


@dataclass(frozen=True, slots=True)
class ChildTask:
    """A kind of child. `name`: of what it serves, for the log. `start_s`: from its start until it serves, which a large library
    and memory to register take (a guess). `hang_s`: the longest time without an answer, far beyond the library's own timeouts,
    each of which may pass twice in a call."""

    name: str
    command: Sequence[str]
    start_s: float = 20.0
    hang_s: float = 60.0


class _Life(asyncio.Protocol):
    """The socket to one process. `served`: an error, or empty; `ended` is set when the socket is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_answer: Callable[[int, list[int]], None]) -> None:
        self._on_answer = on_answer
        self._frames = Frames()
        self.facts: Mapping[str, Any] = {}
        self.served: asyncio.Future[str] = loop.create_future()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Pass answers on."""
        for number, answer, *rest in self._frames.feed(data):
            if number:
                self._on_answer(number, answer)
            elif not self.served.done():
                (self.facts,) = rest
                self.served.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - any end is an end
        """The process has ended, or is about to."""
        if not self.served.done():
            self.served.set_result("its process ended")
        self.ended.set()


class ChildProcess:
    """See the module. `settings`: for its next life. `on_change`: called when it begins to serve, and when it ends."""

    def __init__(
        self,
        task: ChildTask,
        settings: Mapping[str, Any],
        memory_bytes: int,
        *,
        random: Uniform,
        on_change: Callable[[], None],
        back_off: BackOffSettings | None = None,
    ) -> None:
        self._kind = task
        self.settings = dict(settings)
        self._memory_bytes = memory_bytes
        self._on_change = on_change
        self._back_off = BackOff(back_off or BackOffSettings(first_s=0.5, most_s=30.0), random)
        self._transport: asyncio.WriteTransport | None = None  # while it serves
        self._waiting: dict[int, tuple[OnAnswer, asyncio.TimerHandle]] = {}
        self._numbers = 0
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.memory: kvpool_native.Mapping | None = None  # of the present life
        self.facts: Mapping[str, Any] = {}  # of the present life
        self.lives = 0
        self._is_killed = False
        self.error = ""  # why the last attempt failed, while it does not serve

    def __repr__(self) -> str:
        return (
            f"<ChildProcess {'serving' if self.is_serving else 'away'}, {self.lives} lives, {len(self._waiting)} asked>"
        )

    @property
    def is_serving(self) -> bool:
        """Whether requests are sent."""
        return self._transport is not None

    @property
    def asked(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    @property
    def has_ended_by_itself(self) -> bool:
        """Whether nobody here has ended the last life."""
        return not self.is_serving and not self._is_killed and not self._closing.is_set()

    def start(self) -> None:
        """Begin the first life, in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> bool:
        """End the process. False where it has not ended."""
        self._closing.set()
        if self._task is None:
            return True
        if self._transport is not None:
            self._transport.close()  # the process ends by itself
        _, left = await asyncio.wait({self._task}, timeout=2 * STOP_S)
        return not left

    def send_request(
        self,
        request: Sequence[object],
        on_answer: OnAnswer,
        *,
        hang_s: float | None = None,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a request. `hang_s`: of one that others answer, who may take longer. `on_hang`: called before the process is
        ended because this one has no answer. REQUIRES: `is_serving`."""
        assert self._transport is not None
        self._numbers += 1
        longest_s = self._kind.hang_s if hang_s is None else hang_s
        hang = asyncio.get_running_loop().call_later(longest_s, self._end_hanging, longest_s, on_hang)
        self._waiting[self._numbers] = (on_answer, hang)
        self._transport.write(pack([self._numbers, *request]))

    def send_note(self, note: Sequence[object]) -> None:
        """Send what has no answer. REQUIRES: `is_serving`."""
        assert self._transport is not None
        self._transport.write(pack([0, *note]))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing.is_set():
            begun_s = loop.time()
            try:
                await self._live()
            except (OSError, MemoryError, ProtocolError) as error:
                self._note_error(str(error))
            if loop.time() - begun_s >= GOOD_LIFE_S:
                self._back_off.succeed()
            if not self._closing.is_set():
                with contextlib.suppress(asyncio.TimeoutError):  # the end of the pause
                    await asyncio.wait_for(self._closing.wait(), self._back_off.fail())

    async def _live(self) -> None:
        """One life, from the start of the process to its end."""
        loop = asyncio.get_running_loop()
        memory = kvpool_native.Mapping.create("kvpool-child", self._memory_bytes)
        ours, theirs = socket.socketpair()
        with theirs:
            start = partial(self._spawn, theirs.fileno(), memory.fd)
            self._is_killed = False
            self.process = process = await loop.run_in_executor(None, start)
        transport, life = await loop.create_unix_connection(lambda: _Life(loop, self._take_answer), sock=ours)
        try:
            transport.write(pack(self.settings))
            closing: asyncio.Future[bool] = loop.create_task(self._closing.wait())
            either: set[asyncio.Future[Any]] = {life.served, closing}
            await asyncio.wait(either, timeout=self._kind.start_s, return_when=asyncio.FIRST_COMPLETED)
            closing.cancel()
            if self._closing.is_set() and not life.served.done():
                return
            error = life.served.result() if life.served.done() else "it took too long to start"
            if error:
                self._note_error(error)
                return
            log.info("%s is served by process %d", self._kind.name, process.pid)
            self.error, self.memory, self.facts, self._transport = "", memory, life.facts, transport
            self.lives += 1
            self._on_change()
            await life.ended.wait()
        finally:
            transport.close()
            await self._end(process)

    async def _end(self, process: "subprocess.Popen[bytes]") -> None:
        was_serving, self._transport = self._transport is not None, None
        waiting, self._waiting = self._waiting, {}
        for on_answer, hang in waiting.values():
            hang.cancel()
            on_answer(None)
        if was_serving:
            if not self._closing.is_set():
                self._note_error("its process ended")
            self._on_change()
        await asyncio.get_running_loop().run_in_executor(None, _reap, process)
        self.process = None

    def _spawn(self, socket_fd: int, memory_fd: int) -> "subprocess.Popen[bytes]":
        arguments = [*self._kind.command, str(socket_fd), str(memory_fd), str(self._memory_bytes)]
        return subprocess.Popen(  # noqa: S603 - this package's own program
            arguments, stdin=subprocess.DEVNULL, pass_fds=(socket_fd, memory_fd), start_new_session=True
        )

    def _take_answer(self, number: int, codes: list[int]) -> None:
        on_answer, hang = self._waiting.pop(number)
        hang.cancel()
        on_answer(codes)

    def _end_hanging(self, longest_s: float, on_hang: Callable[[], None]) -> None:
        on_hang()
        self.kill(f"it has not answered for {longest_s:g} s")

    def kill(self, reason: str) -> None:
        """End this life at once; another one begins after the back-off."""
        self._note_error(reason)
        if self.process is not None:
            self._is_killed = True
            self.process.kill()

    def _note_error(self, error: str) -> None:
        if error != self.error:
            log.warning("%s cannot be used: %s", self._kind.name, error)
        self.error = error


def _reap(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel
            process.wait(STOP_S)
