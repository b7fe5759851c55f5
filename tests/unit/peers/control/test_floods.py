"""Tests of floods: the loop's share bounds the work for other nodes, and answers to nothing end the link."""

import asyncio

import pytest
import zmq

from kvpool.peers.control import records as r
from kvpool.peers.control import wire
from kvpool.peers.loop_share import PIECE_NS_MAX, SLICE_NS, LoopShare
from kvpool.peers.loop_socket import LoopSocket
from tests.rigs.clock import HandClock
from tests.rigs.nodes.peers import Owner, fleet, until


def _use(share: LoopShare, clock: HandClock, time_ns: int) -> None:
    with share.used():
        clock.ns += time_ns


def test_work_beyond_the_slice_is_followed_by_a_pause() -> None:
    clock = HandClock(0)
    share = LoopShare(0.2, clock)
    assert share.wait_s == 0.0
    _use(share, clock, 2 * SLICE_NS)
    assert share.wait_s > 0.0
    clock.ns += int(share.wait_s * 1e9) + 1
    assert share.wait_s == 0.0


def test_no_more_than_the_share_is_used() -> None:
    clock = HandClock(0)
    share = LoopShare(0.2, clock)
    worked = 0
    while clock.ns < 1_000_000_000:
        wait_s = share.wait_s
        clock.ns += int(wait_s * 1e9) + 1
        if not wait_s:
            _use(share, clock, 100_000)
            worked += 100_000
    assert 0.15 < worked / clock.ns < 0.21


def test_time_without_work_saves_up_one_slice() -> None:
    clock = HandClock(0)
    share = LoopShare(0.2, clock)
    clock.ns += 10**12
    assert share.wait_s == 0.0
    _use(share, clock, 2 * SLICE_NS)
    assert share.wait_s > 0.0


def test_a_machine_that_stopped_in_the_middle_costs_a_bounded_pause() -> None:
    clock = HandClock(0)
    share = LoopShare(0.2, clock)
    _use(share, clock, 10**12)
    assert share.wait_s < (PIECE_NS_MAX + SLICE_NS) / 0.2 / 1e9


@pytest.mark.asyncio
async def test_expensive_messages_are_read_a_few_at_a_time() -> None:
    clock = HandClock(0)
    context = zmq.Context()
    sending, receiving = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiving.bind("inproc://here")
    sending.connect("inproc://here")
    for _ in range(20):
        sending.send(b"expensive")
    taken = 0

    def take(_: object) -> None:
        nonlocal taken
        taken += 1
        clock.ns += 2 * SLICE_NS

    made = LoopSocket(receiving, asyncio.get_running_loop(), take, share=LoopShare(0.2, clock))
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken == 1, "the clock stands but for the messages, and so there is no further turn"
    clock.ns += 10 * SLICE_NS
    while taken < 2:
        await asyncio.sleep(0.001)
    made.close()
    context.destroy(linger=0)


@pytest.mark.asyncio
async def test_answers_to_nothing_without_end_end_the_link() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        watcher = nodes.watch()
        link = await watcher.ready(server)
        flooded = r.Pong(bytes(r.INCARNATION_BYTES))
        route = next(iter(server._pullers.all())).route
        for number in range(1000):
            while not server._listener.send(route, wire.encode_message(flooded, 1000 + number)):
                await asyncio.sleep(0.001)
                if watcher.client.counts["disconnects"]:
                    break
            if watcher.client.counts["disconnects"]:
                break
            await asyncio.sleep(0)
        await until(lambda: watcher.client.counts["disconnects"] == 1, f"the link has ended: {link.fault}")
        assert watcher.client.counts["late_answers"] <= 40
