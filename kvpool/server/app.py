"""App: the daemon's process. Builds everything from a valid configuration, serves, drains, ends.

    (WAITING) ──► STARTING ──first segment faulted in──► SERVING ──SIGTERM/SIGINT──► DRAINING ──nothing under way, or
    stop_timeout──► STOPPED

It waits where its last lives ended early and a service manager restarts it (`lives`). The socket appears with SERVING. In
DRAINING new connections and reservations are refused, and reservations under way may still be committed. Chunks that DRAM alone
has stay in memory that outlives the daemon for certain, or are written down beside them and after, for the lower tiers' stop
timeout at most. Control thread only, but for the pre-fault, transfer, self-probe and HTTP threads that it starts and joins.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import kvpool_native
from kvpool import __version__, failpoint
from kvpool.clock import Deadline, MonotonicClock
from kvpool.config.config import Config
from kvpool.errors import ConfigError
from kvpool.keys import domain_key, domain_tag
from kvpool.pool.lower_tiers import KINDS
from kvpool.pool.pool import Pool
from kvpool.server.connections.local_socket import LocalSocket
from kvpool.server.connections.refusal_log import RefusalLog
from kvpool.server.daemon import DRAIN_POLL_S, Daemon, Terms
from kvpool.server.descriptor_room import PeerRoom, plan_descriptors, raise_limit
from kvpool.server.health.systemd import ServiceManager
from kvpool.server.keeping.choice import choose_keeper
from kvpool.server.keeping.descriptor_store import DescriptorStore, take_passed
from kvpool.server.keeping.keeper_watch import watch_keeper
from kvpool.server.keeping.own_keeper import OwnKeeper
from kvpool.server.operators import Operators
from kvpool.server.signals import Signals
from kvpool.server.start_checks import addresses_in_use, read_secret
from kvpool.tiers.dram.kept.kept_memory import KeptMemory
from kvpool.units import format_size

if TYPE_CHECKING:
    from kvpool.server.peers.fleet import Fleet

log = logging.getLogger(__name__)

EXTEND_EVERY_S = 5.0
START_S = 90.0  # what a service manager gives a start
# So many lives in a row that a service manager has restarted, and the memory that they went on from may be why.
EARLY_ENDS_MAX = 5
# A stop after which the unit's manager begins the next life: its memory would be given up if the service stayed down.
EXIT_RESTART = 128 + signal.SIGINT


def _leave(kept: KeptMemory, listener: LocalSocket) -> None:
    """End before serving."""
    kept.give_attempt_back()
    listener.abandon()


class App:
    """One process of the daemon. After `run`, `has_ended` is False where a thread is left that waits for a disk, and
    `exit_code` is what its manager is to see."""

    def __init__(self, config: Config, reread: Callable[[], Config]) -> None:
        """`reread` reads the configuration again from where it came. Raises ConfigError."""
        self._config = config
        self._reread = reread
        self._clock = MonotonicClock()
        operators = Operators(os.geteuid(), config.server.admin_group)
        domain = domain_key(read_secret(config.server.domain_secret_file))
        room = plan_descriptors(config, raise_limit())
        if room.shortage:
            log.warning("%s", room.shortage)
        self._terms = Terms(room.connections, operators, domain)
        self._fleets = self._make_fleets(domain, room.peers) if config.peer.is_used else []
        self._signals = Signals()
        self._manager = ServiceManager(os.environ)
        self._passed = take_passed(os.environ, os.getpid())
        self._keeper: DescriptorStore | OwnKeeper | None = None
        self.has_ended = True
        self.exit_code = 0

    def _make_fleets(self, domain: bytes, room: PeerRoom) -> "list[Fleet]":
        from kvpool.server.peers.fleet import Fleet  # a fifth of a start, which a node without peers has no use for

        config = self._config
        return [Fleet(config.peer, domain, room, self._clock, socket=config.server.socket)]

    async def run(self) -> None:
        """Serve until a signal. Raises ConfigError, SocketInUse, OSError or MemoryError if serving cannot begin or go on."""
        started_ns = self._clock.now_ns()
        server = self._config.server
        self._signals.hold()  # or a lock would be left that nobody owns yet
        listener = LocalSocket(
            server.socket,
            mode=server.socket_mode,
            handshake_timeout_s=server.handshake_timeout,
            on_refused=RefusalLog(self._clock).note_refusal,
        )
        self._signals.end_at_once(listener.abandon)
        is_clean = False
        try:
            if not await self._wait_after(listener):
                is_clean = True
                return
            if taken := [*addresses_in_use(self._config)]:
                raise OSError("; ".join(taken))  # before anything that is kept is dropped
            kept = self._find_kept(listener)
            self._signals.end_at_once(partial(_leave, kept, listener))
            pool = Pool(self._config, self._clock, [*KINDS, *(fleet.plan_tier for fleet in self._fleets)], kept)
            try:
                await self._run_pool(pool, listener, started_ns)
            finally:
                ended = [await fleet.close() for fleet in self._fleets]
                self.has_ended = await pool.stop() and all(ended)
            is_clean = True
        except ConfigError:
            is_clean = True  # refused: no restart follows
            raise
        finally:
            self._signals.ignore()  # where it has not come to serving; before another daemon may have the socket's place
            if isinstance(self._keeper, OwnKeeper):
                self._keeper.close()  # or that one would find it busy
            await listener.stop(is_clean=is_clean)
            self._signals.forget()

    def _find_kept(self, listener: LocalSocket) -> KeptMemory:
        """What of this process outlives it, and what it has of a former one. REQUIRES: no other daemon has the socket."""
        choice = choose_keeper(
            self._config.server, self._manager, self._passed, environment=os.environ, pid=os.getpid()
        )
        self._keeper = choice.keeper
        ends = listener.life.early_ends
        is_distrusted = self._manager.is_there and ends >= EARLY_ENDS_MAX
        return KeptMemory(
            choice.keeper,
            domain_tag(self._terms.domain),
            self._clock,
            why_nobody=choice.why_nobody,
            why_cold=f"the last {ends} lives ended early" if is_distrusted else "",
        )

    async def _wait_after(self, listener: LocalSocket) -> bool:
        """Wait where earlier lives ended early and a manager restarts them. False if a signal has ended the wait."""
        life = listener.life
        if not life.wait_s or not self._manager.is_there:
            return True
        why = f"because the last {life.early_ends} lives ended early"
        status = f"waits {life.wait_s:g} s, {why}; a restart by hand does not wait"
        stopping = asyncio.Event()
        self._signals.catch(asyncio.get_running_loop(), stop=stopping.set, reload=stopping.is_set)
        log.warning("kvpoold %s", status)
        self._manager.status(status)
        self._manager.extend(life.wait_s + START_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopping.wait(), life.wait_s)
        self._signals.end_at_once(listener.abandon)
        await asyncio.sleep(0)  # what a signal has just asked for
        if not stopping.is_set():
            return True
        log.info("stopped by signal while waiting")
        return False

    async def _run_pool(self, pool: Pool, listener: LocalSocket, started_ns: int) -> None:
        daemon = Daemon(
            self._config,
            self._reread,
            terms=self._terms,
            listener=listener,
            pool=pool,
            clock=self._clock,
            manager=self._manager,
            fleets=self._fleets,
        )
        watch = None
        try:
            daemon.start()
            await pool.start()
            watch = watch_keeper(self._keeper, pool.kept)
            for fleet in self._fleets:
                await fleet.start(pool)
            self._signals.catch(asyncio.get_running_loop(), stop=daemon.stopping.set, reload=daemon.reload_soon)
            daemon.serve()
            # What exists now lives as long as the process: a full collection need not walk it (50 ms of the control thread).
            gc.freeze()
            gc.enable()  # `kvpoold` has disabled it for the imports
            self._begin_serving(daemon, pool, started_ns)
            await daemon.stopping.wait()
            daemon.reload.cancel()
            daemon.supervision.begin_draining()
            if daemon.failure is not None:
                raise daemon.failure
            await self._drain(daemon, pool)
        finally:
            if watch is not None:
                watch.stop()
            self._signals.ignore()
            await daemon.end_threads()

    def _begin_serving(self, daemon: Daemon, pool: Pool, started_ns: int) -> None:
        """Say so, to the service manager and in the log."""
        socket, capacity = self._config.server.socket, format_size(self._config.dram.capacity)
        serving = f"at {socket}: dram {capacity} ({pool.page_use().mode} pages)"
        daemon.supervision.begin_serving(socket, status=f"serving {serving}", discard=pool.discard)
        seconds, probing = (self._clock.now_ns() - started_ns) / 1e9, daemon.supervision.describe_probing()
        peers = "; ".join(fleet.describe() for fleet in self._fleets) or "no peers"
        shown = f"{serving}, transport shared memory, {probing}, {peers}"
        log.info("kvpoold %s ready in %.2f s %s", __version__, seconds, shown)
        asyncio.get_running_loop().run_in_executor(None, kvpool_native.tune_copies)

    async def _drain(self, daemon: Daemon, pool: Pool) -> None:
        """Let running saves end while DRAM is demoted, unless it is kept; no new reservation is accepted."""
        failpoint.reach("daemon.drain.begin")
        started_ns = self._clock.now_ns()
        pool.chains.is_stopping = True
        await daemon.supervision.end_probe()  # and with it the self-probe's chunk, which nobody misses
        server = daemon.config.server
        deadline = Deadline(server.stop_timeout, self._clock)

        def begin_demotion(timeout_s: float) -> asyncio.Future[dict[str, int]]:
            return asyncio.ensure_future(pool.demote_all(timeout_s, lambda: daemon.has_connections or pool.is_ending))

        writing = None
        if why_written := self._why_written(server.stop, pool.kept):
            if pool.has_lower_tier:
                log.info("a lower tier gets what dram alone has: %s", why_written)
            writing = begin_demotion(daemon.config.stop_timeout)
        extended = Deadline(EXTEND_EVERY_S, self._clock)  # no probe does it any more
        while pool.is_busy and not deadline.has_passed():
            if extended.has_passed():
                daemon.supervision.go_on_draining()
                extended = Deadline(EXTEND_EVERY_S, self._clock)
            await asyncio.sleep(DRAIN_POLL_S)
        await daemon.close_connections()
        if writing is None:
            why_written = self._why_written(server.stop, pool.kept)  # its keeper may have ended meanwhile
            writing = begin_demotion(daemon.config.stop_timeout if why_written else 0.0)
        while not writing.done():
            daemon.supervision.go_on_draining()
            await asyncio.wait([writing], timeout=EXTEND_EVERY_S)
        written = writing.result()
        if server.stop == "demote" or self._why_unfound:
            pool.kept.drop()
        elif not why_written and self._is_restart and isinstance(self._keeper, DescriptorStore):
            self.exit_code = EXIT_RESTART
        failpoint.reach("daemon.drain.end")
        log.info(
            "stopped by signal: %d chunks written down, %d %s, durable: %s, drained in %.2f s",
            written["chunks"],
            written["left"],
            f"left in memory alone, with {pool.kept.keeper_name}"
            if pool.kept.is_kept
            else "dropped with the DRAM tier",
            "yes" if written["durable"] else "no",
            (self._clock.now_ns() - started_ns) / 1e9,
        )

    def _why_written(self, stop: str, kept: KeptMemory) -> str:
        """Why a stop writes down what DRAM alone has, as a clause; empty where that stays in memory."""
        if stop == "demote":
            return "server.stop is demote"
        if stop == "keep" and kept.is_kept:
            return self._why_unfound
        return kept.why_it_may_end(is_restart=self._is_restart)

    @property
    def _why_unfound(self) -> str:
        """Why the next daemon would not find the keeper; empty where it would, or there is none."""
        return self._keeper.why_unfound if isinstance(self._keeper, OwnKeeper) and self._keeper.pid else ""

    @property
    def _is_restart(self) -> bool:
        """By the unit's word; of a keeper process it makes no difference."""
        return self._signals.stopped_by == signal.SIGINT
