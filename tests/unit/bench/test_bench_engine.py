"""kvpool over TransferEngine and NIXL in `bench peer`, with a scripted library: it needs no package."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvpool_tools.bench.peer import peer
from kvpool_tools.bench.peer.engine_ways import KVPOOL, EngineAbsent, EngineChoice, EngineWays
from kvpool_tools.bench.peer.node import EXTENTS, Node
from kvpool_tools.bench.peer.peer import bench_peer
from tests.rigs.transfer.engine_pair import SCRIPTED
from tests.rigs.transfer.scripted_engine import Script

CHUNKS, CHUNK_BYTES = 6, EXTENTS * 4096


LIBRARY = pytest.mark.parametrize("library", list(KVPOOL))


def _choice(directory: Path, script: Script, library: str = "mooncake") -> EngineChoice:
    (directory / "script").mkdir()
    script.write(directory / "script")
    return EngineChoice("tcp", str(directory / "script"), library, SCRIPTED, has_library=False)


@contextmanager
def _ways(choice: EngineChoice, streams: int) -> Iterator[tuple[EngineWays, Node, Node]]:
    source, target = Node(CHUNKS, CHUNK_BYTES), Node(CHUNKS, CHUNK_BYTES)
    source.fill()
    made = EngineWays(choice, source, target, streams=streams)
    try:
        yield made, source, target
    finally:
        made.close()


def _children() -> set[int]:
    """Processes that this one has started and not waited for."""
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(one) for path in lists for one in path.read_text().split()}


@LIBRARY
@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_pull_brings_every_byte_and_counts_time_of_all_processes(tmp_path: Path, streams: int, library: str) -> None:
    before = _children()
    with _ways(_choice(tmp_path, Script(), library), streams) as (ways, source, target):
        for _ in range(2):
            seconds, cpu_s, first_us = ways.pull(KVPOOL[library])
            assert 0 < first_us <= seconds * 1e6
            assert cpu_s > 0
            pairs = zip(source.chunks(), target.chunks(), strict=True)
            assert all(np.array_equal(sent, received) for sent, received in pairs)
        assert len(_children() - before) == 2
    assert _children() == before


@LIBRARY
@pytest.mark.slow
def test_a_move_that_never_ends_is_late_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr("kvpool_tools.bench.peer.engine_ways.LONG_S", 2.0)
    before = _children()
    with (
        _ways(_choice(tmp_path, Script(is_stuck=True), library), 1) as (ways, _, _),
        pytest.raises(EngineAbsent, match=f"{KVPOOL[library]} failed: late"),
    ):
        ways.pull(KVPOOL[library])
    assert _children() == before


def test_a_library_that_cannot_begin_is_absent_with_its_reason(tmp_path: Path) -> None:
    before = _children()
    with (
        pytest.raises(EngineAbsent, match="no port is free"),
        _ways(_choice(tmp_path, Script(refusal="no port is free")), 1),
    ):
        pass
    assert _children() == before


def test_a_way_that_fails_has_no_rows_and_the_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "QUICK_SIZES", peer.QUICK_SIZES[:1])
    monkeypatch.setattr(peer, "STREAMS", peer.STREAMS[:1])
    notes: list[str] = []
    rows = bench_peer(True, lambda _: None, _choice(tmp_path, Script(fails=True)), notes)
    assert {row["way"] for row in rows} >= {"socket", "stream"}
    assert not {row["way"] for row in rows} & set(KVPOOL.values())
    for way, note in zip(KVPOOL, notes, strict=True):
        absent = f"rows of {KVPOOL[way]}, 64 KiB, 1 at once are absent"
        assert note == f"{absent}: {KVPOOL[way]} failed: broken"
