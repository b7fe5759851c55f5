"""Tests of the arrival watch: soon after bytes have come, once in a while for each connection, whoever reads them."""

import asyncio
import os
import socket
from contextlib import suppress

import pytest

from kvpool.peers.arrival_watch import REST_S, ArrivalWatch
from tests.rigs.nodes.peers import until


async def pass_time(seconds: float) -> None:
    """Turns of the loop in which nothing may happen."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    await until(lambda: loop.time() >= end_s, "the time has passed")


@pytest.mark.asyncio
async def test_a_flood_is_reported_soon_and_then_once_in_a_rest() -> None:
    arrivals: list[int] = []
    loop = asyncio.get_running_loop()
    watch = ArrivalWatch(loop, arrivals.append)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        watch.add_connection(near.fileno())
        begun_s = loop.time()
        while loop.time() < begun_s + 100 * REST_S or len(arrivals) < 2:  # a busy machine has few turns
            with suppress(BlockingIOError):
                far.send(b"flood")
            near.recv(4)  # by somebody else, who does not keep up
            await asyncio.sleep(0)
        took_s = loop.time() - begun_s
        assert len(arrivals) <= took_s / REST_S + 2
        await pass_time(3 * REST_S)
        near.recv(1 << 20)
        seen = len(arrivals)
        await pass_time(5 * REST_S)
        assert len(arrivals) <= seen + 1  # an idle connection costs nothing
        seen = len(arrivals)
        far.send(b"again")
        await until(lambda: len(arrivals) > seen, "it is seen again")
        watch.remove(near.fileno())
        far.send(b"unwatched")
        seen = len(arrivals)
        await pass_time(2 * REST_S)
        assert len(arrivals) == seen
    watch.close()
    watch.close()


@pytest.mark.asyncio
async def test_a_number_that_is_used_again_is_another_connection() -> None:
    arrivals: list[int] = []
    watch = ArrivalWatch(asyncio.get_running_loop(), arrivals.append)
    pairs = [socket.socketpair() for _ in range(2)]
    held = os.dup(pairs[0][0].fileno())  # as the guard holds it, while another owner's stays open
    watch.add_connection(held)
    pairs[0][1].send(b"x")
    await until(lambda: arrivals == [held], "it is seen")
    watch.remove(held)
    os.dup2(pairs[1][0].fileno(), held)
    watch.add_connection(held)
    pairs[0][1].send(b"of the former")
    await pass_time(3 * REST_S)
    assert arrivals == [held]
    pairs[1][1].send(b"y")
    await until(lambda: arrivals == [held, held], "the new one is seen")
    watch.remove(held)
    os.close(held)
    watch.close()
    for pair in pairs:
        for one in pair:
            one.close()
