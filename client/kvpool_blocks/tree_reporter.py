"""Tree reporter: reports the whole chunks of the prefix tree to the daemon, for the event stream's level 0.

    engine's thread                            thread `kvpool-tree-reports`
    insert, evict ──► inbox (what has          takes the inbox ──► one report at a time, of many chunks, at most one
    entered and left) ──► wakes it             each INTERVAL_S; a full one is followed sooner

A chunk is there while its last block is in the tree: blocks are inserted parents first, and leaves are evicted first. What
entered and left again before its turn is never reported. Over a new connection everything is reported anew, and so it is after
a report that failed; while the daemon is away nothing is woken. Chunks that the daemon declines (it has a bound) are offered
again now and then.

The engine's thread appends to the inbox and does nothing else: keys are hashed, and round trips made, on the other one, which
takes turns with the engine's requests for one short report at most. Nothing here raises.

Bounds: the inbox has each chunk of the tree once, and besides those that the thread knows as part of it, so no more than twice
the blocks there are. Lock: `_lock` guards the inbox. Invariant of the thread: `_taken`, `_declined` and `_unsent` divide
`_present`.
"""

import itertools
import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError, Refused
from kvpool.protocol.records import engine_chunks as ec
from kvpool.states import ReportState
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree
from kvpool_client.connection.engine_reports import EngineReports, ReportedChunk
from kvpool_client.connection.session import Session
from kvpool_client.engines.failure_guard import FailureGuard

log = logging.getLogger(__name__)

# Between two reports: what a router need not know sooner (guess). After a full one, and after one that failed; each further one
# that fails doubles that.
INTERVAL_S = 0.05
FULL_INTERVAL_S = 0.01
RETRY_S = 0.5
RETRY_S_MAX = 60.0
# How long declined chunks wait before they are offered again, and the longest wait of an idle thread.
DECLINED_S = 5.0
IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Of a report: keys that have left, and nodes that have entered."""

    removed: list[bytes]
    nodes: list[Node]


class TreeReporter:
    """See the module. It has no reference to the tree, and ends with it where it is not closed."""

    def __init__(self, reports: EngineReports, tree: PrefixTree, chunk_blocks: int) -> None:
        """`chunk_blocks`: blocks of a chunk."""
        self._reports = reports
        self._chunk_blocks = chunk_blocks
        self._guard = FailureGuard(log)
        self._lock = threading.Lock()
        self._entered: dict[Node, None] = {}  # guarded by _lock
        self._left: dict[Node, None] = {}  # guarded by _lock
        self._is_away = False
        self._woken, self._closing = threading.Event(), threading.Event()
        self._session: Session | None = None
        self._is_anew = True
        self._present: dict[Node, None] = {}
        self._keys: dict[Node, bytes] = {}
        self._unsent: dict[Node, None] = {}
        self._declined: dict[Node, None] = {}
        self._taken: set[Node] = set()
        self._leaving: deque[bytes] = deque()
        self._offer_again = Deadline(0.0)
        self._retry_s = RETRY_S
        self._thread = threading.Thread(target=self._run, name="kvpool-tree-reports", daemon=True)
        if reports.chunks_max:
            reports.on_connected(self._note_connected)
            tree.watch(chunk_blocks, self)
            weakref.finalize(tree, self._stop).atexit = False  # the end of the process ends its reports anyway
            self._thread.start()

    def stats(self) -> dict[str, int]:
        """How many chunks the daemon has as reported, and how many it has declined."""
        return {
            "reported_chunks": len(self._taken),
            "declined_reports": len(self._declined),
            "failed_reports": self._guard.failures,
        }

    def enter(self, node: Node) -> None:
        """The last block of a chunk has come into the tree. Engine's thread."""
        with self._lock:
            self._entered[node] = None
        self._wake()

    def leave(self, node: Node) -> None:
        """The last block of a chunk has left the tree. Engine's thread."""
        with self._lock:
            if node in self._entered:
                del self._entered[node]
                return
            self._left[node] = None
        self._wake()

    def close(self, timeout_s: float) -> None:
        """Have the daemon drop what was reported, and end the thread. Waits for it at most `timeout_s`. Idempotent."""
        self._stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _stop(self) -> None:
        self._closing.set()
        self._woken.set()

    def _wake(self) -> None:
        if not self._is_away and not self._woken.is_set():
            self._woken.set()

    def _note_connected(self) -> None:
        self._is_away = False
        self._woken.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.wait(DECLINED_S if self._declined else IDLE_S)
            self._woken.clear()
            pause_s = self._guard.call("reporting", None, self._turn)
            self._closing.wait(self._begin_anew() if pause_s is None else pause_s)
        self._guard.call("ending the reports", None, self._end)
        self._reports.forget(self._note_connected)

    def _turn(self) -> float:
        """Send one report, where there is something to report. How long to wait before the next one."""
        session = self._reports.session
        if session is None:
            self._is_away = True
            if self._reports.session is not None:  # it came just now, and has been noted before
                self._note_connected()
            return INTERVAL_S
        if session is not self._session:
            self._begin(session)
        self._take_news()
        batch = self._next_batch()
        if not batch.removed and not batch.nodes:
            return INTERVAL_S
        is_anew, self._is_anew = self._is_anew, False
        stored = [self._reported(node) for node in batch.nodes]
        try:
            states = self._reports.send(session, batch.removed, stored, is_anew=is_anew)
        except KVPoolError as error:
            return self._note_failure(session, error, is_anew=is_anew)
        self._settle(batch, states)
        if not self._unsent and not self._leaving:
            self._retry_s = RETRY_S
            return INTERVAL_S
        self._woken.set()
        return FULL_INTERVAL_S

    def _begin(self, session: Session) -> None:
        """Report everything anew."""
        self._session, self._is_anew = session, True
        self._leaving.clear()
        self._taken.clear()
        self._declined.clear()
        self._keys.clear()  # a daemon of another trust domain has others
        self._unsent = dict(self._present)

    def _take_news(self) -> None:
        with self._lock:
            entered, left = self._entered, self._left
            self._entered, self._left = {}, {}
        for node in left:
            del self._present[node]
            key = self._keys.pop(node, b"")
            if node in self._taken:
                self._taken.remove(node)
                self._leaving.append(key)
            else:
                self._unsent.pop(node, None)
                self._declined.pop(node, None)
        self._present.update(entered)
        self._unsent.update(entered)

    def _next_batch(self) -> _Batch:
        """The next removals, and behind the last of them the next chunks that are there."""
        removed = list(itertools.islice(self._leaving, ec.REPORT_CHUNKS_MAX))
        room = 0 if len(removed) < len(self._leaving) else ec.REPORT_CHUNKS_MAX - len(removed)
        if not removed and not self._unsent and self._declined and self._offer_again.has_passed():
            self._offer_again = Deadline(DECLINED_S)
            self._unsent = dict.fromkeys(itertools.islice(self._declined, ec.REPORT_CHUNKS_MAX))
            for node in self._unsent:
                del self._declined[node]
        return _Batch(removed, list(itertools.islice(self._unsent, min(room, self._reports.chunks_max))))

    def _settle(self, batch: _Batch, states: bytes) -> None:
        for _ in batch.removed:
            self._leaving.popleft()
        for node, state in zip(batch.nodes, states, strict=True):
            del self._unsent[node]
            if state == ReportState.TAKEN:
                self._taken.add(node)
            else:
                self._declined[node] = None
        if self._declined and not self._unsent and self._offer_again.has_passed():
            self._offer_again = Deadline(DECLINED_S)

    def _note_failure(self, session: Session, error: KVPoolError, *, is_anew: bool) -> float:
        """How long to wait before the next report."""
        if isinstance(error, Refused) and error.code == "busy":
            self._is_anew = is_anew  # nothing was taken: the same again
            self._woken.set()
            return RETRY_S
        self._guard.miss("reporting", error)
        self._reports.note_failure(session, error)
        return self._begin_anew()

    def _begin_anew(self) -> float:
        """What the daemon has taken is unknown: everything is reported again. How long to wait before."""
        self._session = None
        self._woken.set()
        pause_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S_MAX)
        return pause_s

    def _end(self) -> None:
        session = self._reports.session
        if session is not None and session is self._session:
            self._reports.send(session, (), (), is_anew=True)

    def _reported(self, node: Node) -> ReportedChunk:
        """The chunk that ends with this block. REQUIRES: those before it were reported, or declined."""
        scope, blocks, first = node.scope, [node.tokens], node
        for _ in range(self._chunk_blocks - 1):
            assert first.parent is not None
            first = first.parent
            blocks.append(first.tokens)
        before = first.parent
        assert before is not None
        is_first = before.parent is None
        tokens = b"".join(reversed(blocks))
        parent = self._reports.root(scope.salt, scope.adapter) if is_first else self._keys[before]
        leaf = kvpool_native.hash_leaves(np.frombuffer(tokens, "<i4"), self._reports.chunk_tokens)
        self._keys[node] = kvpool_native.chain_keys(parent, leaf)
        return ReportedChunk(parent, is_first, tokens, self._reports.scope(scope.salt, scope.adapter))
