"""Connections made before chunks are wanted, with a scripted library: when, how often, and what pulls do meanwhile."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from kvpool.peers.control.link import PeerLink
from kvpool.transfer.engine import engine
from kvpool.transfer.engine.connector import AGAIN_S, READ_BYTES
from kvpool.transfer.engine.engine import LIBRARIES, Half
from kvpool.transfer.transport import Ending
from tests.rigs.transfer.engine_pair import Pair, engine_pair, on_engines_of, until
from tests.rigs.transfer.scripted_engine import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> str:
    """One whose owners are read from, and one whose owners write."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory, library: str) -> AsyncIterator[Pair]:
    """Engines that serve all tests which end none of their processes."""
    async with engine_pair(tmp_path_factory.mktemp("engines"), library) as serving:
        yield serving


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines: Pair) -> AsyncIterator[Pair]:
    async with on_engines_of(engines) as made:
        yield made


def meet(pair: Pair) -> None:
    pair.here.transport.meet("owner", cast(PeerLink, pair.link))


def connections(pair: Pair) -> int:
    return pair.here.engine.stats()["connections"]


async def test_a_node_that_is_met_is_connected_before_its_chunks_are_wanted(pair: Pair) -> None:
    meet(pair)
    await until(lambda: connections(pair) == 1, "it is connected")
    stats = pair.here.engine.stats()
    assert (stats["pulls"], stats["read_bytes"], stats["quarantined_bytes"]) == (0, 0, 0)
    asked = list(pair.link.asked)
    assert [one.rows for one in asked] == [0] * (2 if pair.here.engine.writes else 1)
    assert await pair.here.transport.accepts(pair.order())
    assert pair.link.asked == asked, "its answer is known"
    assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}


async def test_a_node_is_not_pulled_from_while_the_library_connects(pair: Pair) -> None:
    """The library would keep the pull waiting; the stream does not."""
    puller = pair.here.engine
    pair.mover.follow(Script(is_stuck=True))
    meet(pair)
    await until(lambda: pair.here.transport._connector.is_connecting("owner"), "it connects")
    assert not await pair.here.transport.accepts(pair.order())
    # One page of the node's part of the buffer is taken, no more.
    rest = puller.reserve_range(Half.READ, puller.extent_bytes_max - READ_BYTES, "owner")
    assert rest is not None
    puller.give(rest)
    pair.mover.follow(Script())
    await until(lambda: connections(pair) == 1, "it is connected")
    assert await pair.here.transport.accepts(pair.order())


async def test_a_node_that_serves_later_is_asked_again(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        process = pair.owner.engine.process
        pair.owner.follow(Script(refusal="no device yet"))
        process.kill("a test")
        await until(lambda: not process.is_serving, "the owner's process has ended")
        meet(pair)
        await until(lambda: len(pair.link.asked) > 1, "it is asked again")
        pair.owner.follow(Script())
        await until(lambda: connections(pair) == 1, "it is connected")
        assert len(pair.link.asked) <= 1 + len(AGAIN_S)


async def test_a_new_life_of_the_process_connects_again(tmp_path: Path, library: str) -> None:
    async with engine_pair(tmp_path, library) as pair:
        meet(pair)
        await until(lambda: connections(pair) == 1, "it is connected")
        process = pair.here.engine.process
        assert process.process is not None
        os.kill(process.process.pid, 9)
        await until(lambda: connections(pair) == 2, "its next life is connected too")
        assert process.lives == 2


async def test_where_no_connection_can_be_made_the_stream_is_used_and_no_pull_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "EXPECTED_S", 1.0)
    pair.mover.follow(Script(fails=True))
    meet(pair)
    await until(lambda: pair.mover.engine.stats()["failed_reads"] == 1, "the move has failed")
    await until(lambda: pair.here.transport._connector._task is None, "it is known here")
    assert connections(pair) == 0
    pair.mover.follow(Script())
    assert not await pair.here.transport.accepts(pair.order())


async def test_a_node_that_names_no_address_is_connected_with_its_first_pull(pair: Pair) -> None:
    pair.link.change = lambda staged: replace(staged, address=0) if not staged.gone else staged
    meet(pair)
    await until(lambda: pair.link.asked, "it is asked")
    assert await pair.here.transport.accepts(pair.order())
    assert {one.ending for one in await pair.pull(pair.order())} == {Ending.DONE}
    assert connections(pair) == 0


@pytest.mark.parametrize("library", ["mooncake"], indirect=True)
async def test_another_hosts_address_is_not_read(pair: Pair) -> None:
    pair.link.change = lambda staged: replace(staged, server="192.0.2.1:15000")
    meet(pair)
    await until(lambda: len(pair.link.asked) > 1, "it is asked again")
    assert connections(pair) == 0
    assert pair.here.engine.stats()["failed_reads"] == 0
