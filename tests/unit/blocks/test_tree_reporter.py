"""Tree reporter over a daemon that is a list of reports: what it sends, in which order, and what follows a failure."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import kvpool_native
from kvpool.errors import DaemonUnreachable, InvalidArgument, Refused
from kvpool.protocol.records import engine_chunks as ec
from kvpool.states import ReportState
from kvpool_blocks import tree_reporter
from kvpool_blocks.tree.prefix_tree import Node, PrefixTree
from kvpool_blocks.tree.scope import Scope
from kvpool_blocks.tree_reporter import TreeReporter
from kvpool_client.connection.engine_reports import ReportedChunk
from tests.rigs.daemon import wait_until

SIZE, CHUNK_BLOCKS = 4, 2
ROOT = b"r" * 32


class Desk:
    """Takes reports: in place of `EngineReports` and the daemon behind it. It checks what a daemon checks."""

    chunk_tokens = SIZE * CHUNK_BLOCKS
    chunks_max = 16

    def __init__(self) -> None:
        self.session: object | None = object()
        self.listeners: list[Callable[[], None]] = []
        self.has: dict[bytes, bytes] = {}  # parent by key
        self.reports: list[tuple[int, int, bool]] = []  # removed, stored, anew
        self.room = 1000
        self.failures: list[Exception] = []
        self.noted = 0
        self.gate = threading.Event()
        self.gate.set()

    def on_connected(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        self.listeners.remove(listener)

    def note_failure(self, _session: object, _error: Exception) -> None:
        self.noted += 1

    def root(self, _salt: bytes | None, _adapter: str) -> bytes:
        return ROOT

    def scope(self, _salt: bytes | None, _adapter: str) -> bytes:
        return b""

    def connect(self) -> None:
        self.session = object()
        self.has.clear()
        for listener in self.listeners:
            listener()

    def send(self, session: object, removed: list[bytes], stored: list[ReportedChunk], *, is_anew: bool) -> bytes:
        assert self.gate.wait(60.0)
        assert session is self.session
        assert len(removed) + len(stored) <= ec.REPORT_CHUNKS_MAX
        self.reports.append((len(removed), len(stored), is_anew))
        if self.failures:
            raise self.failures.pop(0)
        if is_anew:
            assert not removed
            self.has.clear()
        for key in removed:
            assert key not in self.has.values(), "a child is still there"
            del self.has[key]
        return bytes(self._take(chunk) for chunk in stored)

    def _take(self, chunk: ReportedChunk) -> int:
        assert len(chunk.tokens) == 4 * self.chunk_tokens
        if not chunk.is_first and chunk.parent not in self.has:
            return ReportState.NO_PARENT
        if len(self.has) >= self.room:
            return ReportState.FULL
        self.has[key_of(chunk.parent, chunk.tokens)] = chunk.parent
        return ReportState.TAKEN


def key_of(parent: bytes, tokens: bytes) -> bytes:
    import numpy as np

    return kvpool_native.chain_keys(parent, kvpool_native.hash_leaves(np.frombuffer(tokens, "<i4"), Desk.chunk_tokens))


class Tree:
    """A prefix tree whose blocks a test names by numbers, and the keys that its chunks must have."""

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self.blocks: dict[tuple[int, ...], Node] = {}
        self.number = 0

    def grow(self, *names: int) -> None:
        """Blocks of a chain, as far as they are not there."""
        parent = self.tree.root(b"root", Scope())
        for end in range(1, len(names) + 1):
            path = names[:end]
            if path not in self.blocks:
                self.number += 1
                tokens = b"".join(value.to_bytes(4, "little") for value in [names[end - 1]] * SIZE)
                self.blocks[path] = self.tree.insert(parent, self.number, tokens, repr(path).encode())
                self.tree.use(self.blocks[path])
            parent = self.blocks[path]

    def drop(self, *names: int) -> None:
        """The last block of a chain."""
        node = self.blocks.pop(names)
        self.tree.leave(node, 0)
        self.tree.evict(node)

    def keys(self) -> set[bytes]:
        """Of all whole chunks."""
        found: dict[tuple[int, ...], bytes] = {}
        for path in sorted(path for path in self.blocks if not len(path) % CHUNK_BLOCKS):
            tokens = b"".join(self.blocks[path[: at + 1]].tokens for at in range(len(path) - CHUNK_BLOCKS, len(path)))
            found[path] = key_of(found.get(path[:-CHUNK_BLOCKS], ROOT), tokens)
        return set(found.values())


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name in ("INTERVAL_S", "FULL_INTERVAL_S", "RETRY_S", "DECLINED_S"):
        monkeypatch.setattr(tree_reporter, name, 0.01)
    return Desk()


@pytest.fixture
def tree() -> Tree:
    return Tree()


@pytest.fixture
def reporter(desk: Desk, tree: Tree) -> Iterator[TreeReporter]:
    made = TreeReporter(cast(Any, desk), tree.tree, CHUNK_BLOCKS)
    yield made
    made.close(5.0)
    assert not made._thread.is_alive()


def converged(desk: Desk, tree: Tree) -> None:
    wait_until(lambda: set(desk.has) == tree.keys(), "the daemon has what the tree has")


def test_many_changes_are_one_report_and_what_came_and_went_is_none(
    desk: Desk, tree: Tree, reporter: TreeReporter
) -> None:
    desk.gate.clear()
    tree.grow(1, 2)
    wait_until(lambda: not reporter._woken.is_set() and not reporter._entered, "the first report is under way")
    for name in range(10):
        tree.grow(9, name)
    for name in range(5):
        tree.drop(9, name)
    desk.gate.set()
    converged(desk, tree)
    assert [report for report in desk.reports if any(report[:2])] == [(0, 1, True), (0, 5, False)]


def test_a_flood_is_cut_into_reports_and_removals_go_first(desk: Desk, tree: Tree, reporter: TreeReporter) -> None:
    for name in range(300):
        tree.grow(9, name)
    converged(desk, tree)
    assert max(stored for _, stored, _ in desk.reports) == Desk.chunks_max
    for name in range(300):
        tree.drop(9, name)
    for name in range(300, 310):
        tree.grow(9, name)
    converged(desk, tree)
    wait_until(lambda: reporter.stats()["reported_chunks"] == 10, "all is settled")


def test_everything_is_reported_anew_over_a_new_connection(desk: Desk, tree: Tree, reporter: TreeReporter) -> None:
    for name in range(20):
        tree.grow(1, 2, 9, name)
    converged(desk, tree)
    desk.session = None
    tree.drop(1, 2, 9, 0)
    wait_until(lambda: reporter._is_away, "it is away")
    reports = len(desk.reports)
    tree.drop(1, 2, 9, 1)
    tree.grow(7, 8)
    assert not reporter._woken.is_set(), "nothing is woken"
    assert len(desk.reports) == reports
    desk.connect()
    converged(desk, tree)
    assert desk.reports[reports][2], "it begins anew"


@pytest.mark.parametrize("error", [DaemonUnreachable("late"), Refused("refused", "broken"), InvalidArgument("defect")])
def test_after_a_failure_everything_is_reported_anew(
    desk: Desk, tree: Tree, reporter: TreeReporter, error: Exception
) -> None:
    tree.grow(1, 2)
    converged(desk, tree)
    desk.failures.append(error)
    tree.grow(3, 4)
    converged(desk, tree)
    assert desk.reports[-1] == (0, 2, True)
    assert (reporter.stats()["failed_reports"], desk.noted) == (1, 1)


def test_a_defect_is_counted_and_ends_nothing(desk: Desk, tree: Tree, reporter: TreeReporter) -> None:
    desk.failures.append(RuntimeError("a defect of the test"))
    tree.grow(1, 2)
    converged(desk, tree)
    assert (reporter.stats()["failed_reports"], desk.noted) == (1, 0)


def test_a_busy_daemon_gets_the_same_report_again(desk: Desk, tree: Tree, reporter: TreeReporter) -> None:
    desk.failures += [Refused("busy", "later")] * 2
    tree.grow(1, 2)
    converged(desk, tree)
    assert desk.reports == [(0, 1, True)] * 3
    assert reporter.stats()["failed_reports"] == 0


def test_declined_chunks_are_offered_again_and_never_removed(desk: Desk, tree: Tree, reporter: TreeReporter) -> None:
    desk.room = 2
    tree.grow(1, 2, 3, 4, 5, 6, 7, 8)
    wait_until(lambda: reporter.stats()["declined_reports"] == 2, "two are declined")
    assert len(desk.has) == 2
    tree.drop(1, 2, 3, 4, 5, 6, 7, 8)
    wait_until(lambda: reporter.stats()["declined_reports"] == 1, "one has gone")
    assert all(not removed for removed, _, _ in desk.reports)
    desk.room = 3
    converged(desk, tree)
    assert len(desk.has) == 3


def test_a_reporter_that_is_closed_has_the_daemon_drop_what_it_reported(desk: Desk, tree: Tree) -> None:
    reporter = TreeReporter(cast(Any, desk), tree.tree, CHUNK_BLOCKS)
    tree.grow(1, 2)
    converged(desk, tree)
    reporter.close(5.0)
    reporter.close(5.0)
    assert desk.has == {}
    assert desk.listeners == []
    tree.grow(1, 2, 3, 4)
    assert desk.reports[-1] == (0, 0, True)


def test_chunks_that_no_report_holds_are_not_reported(desk: Desk, tree: Tree) -> None:
    desk.chunks_max = 0
    reporter = TreeReporter(cast(Any, desk), tree.tree, CHUNK_BLOCKS)
    tree.grow(1, 2)
    assert reporter.stats() == {"reported_chunks": 0, "declined_reports": 0, "failed_reports": 0}
    assert desk.listeners == []
    reporter.close(1.0)
