"""Requests about chains: how long one waits for memory."""

from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_native
from kvpool.ids import EPOCH_BYTES
from kvpool.index.parts import Step
from kvpool.pool.chains import ROOM_WAIT_S, Chains
from kvpool.tiering.tiering import Tiering
from kvpool_tools.sim.pool import SimulatedArena
from tests.rigs.clock import HandClock


def test_a_request_waits_for_memory_by_the_daemons_clock() -> None:
    clock = HandClock(0)
    waits: list[float] = []
    asked: list[bool] = []
    absent: Any = None
    journal: Any = SimpleNamespace(keep_up=lambda: False)
    geometry = kvpool_native.DirectoryGeometry.plan(1 << 20, 1 << 20, 16)
    index = kvpool_native.Mapping.create("index", geometry.index_bytes)
    directory = kvpool_native.Directory(None, index, geometry, bytes(EPOCH_BYTES))
    tiering = Tiering(SimulatedArena(directory, 1 << 20, 16), [], clock)
    room: Any = SimpleNamespace(wait=waits.append)
    chains = Chains(
        readers=absent,
        writers=absent,
        tiering=tiering,
        journal=journal,
        hints=absent,
        expiry=absent,
        usage=absent,
        sharing=absent,
        device_copies=absent,
        pulled_names=absent,
        room=room,
        clock=clock,
        keeps_token_ids=False,
        note_declined=lambda _connection, _states: None,
    )

    def advance(may_wait: bool) -> Step:
        asked.append(may_wait)
        return Step.WAIT

    parts = chains._advance(advance, lambda: True)
    next(parts)
    clock.advance(0.75 * ROOM_WAIT_S)
    next(parts)
    assert waits == pytest.approx([ROOM_WAIT_S, ROOM_WAIT_S / 4])
    clock.advance(0.25 * ROOM_WAIT_S)
    with pytest.raises(StopIteration):
        next(parts)
    assert asked == [True, True, True, False]
