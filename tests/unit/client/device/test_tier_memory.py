"""The device tier's memory in a client: when the daemon is asked, and answers that cannot be used."""

import os
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import Refused
from kvpool.protocol.records import device as dm
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from kvpool_client.copying.device.sources import DeviceCopies
from kvpool_client.copying.device.tier import TierMemory
from kvpool_client.verbs.leased_rows import LeasedRows
from tests.rigs.device import emulated

LAYOUT = kv.Layout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)


class Daemon:
    """A session whose daemon has memory on a device, and copies of a lease's chunks by `columns`."""

    def __init__(self, device: kvpool_native.Device | None, columns: Any = None) -> None:
        self.columns = columns
        self.memory = device.allocate(1 << 21) if device is not None else None
        self.uuid = device.uuid if device is not None else b""
        self.asked: list[str] = []

    def open_device(self, uuid: bytes) -> tuple[mm.Memory, int]:
        self.asked.append("open")
        if self.memory is None:
            raise Refused("device", "this daemon keeps no copies in device memory")
        return mm.Memory(self.uuid, self.memory.size), self.memory.export()

    def call(self, request: dm.FindCopies, answer: type[dm.Copies]) -> dm.Copies:
        self.asked.append(f"find {request.first}")
        part = slice(request.first, request.first + dm.COPIES_MAX)
        return answer(*(np.array(column[part], "<u8").tobytes() for column in self.columns))


def _rows(tiers: list[kv.Level], first: int = 0) -> LeasedRows:
    """The rows of a lease from `first` on."""
    words = np.zeros(len(tiers), np.uint64).tobytes()
    return LeasedRows.of(m.Leased(7, len(tiers), words, words, bytes(tiers), words), range(first, len(tiers)))


def _copies(daemon: Daemon, device: kvpool_native.Device, rows: LeasedRows) -> DeviceCopies | None:
    found: DeviceCopies | None = TierMemory().copies_of(daemon, rows, LAYOUT.stored_bytes, device)  # type: ignore[arg-type]  # a stand-in
    return found


def test_copies_have_addresses_in_the_mapped_memory(device: kvpool_native.Device) -> None:
    daemon = Daemon(device, ([0, 8192, 4096], [11, 12, 13], [5, 0, 6]))
    found = _copies(daemon, device, _rows([kv.Level.HBM] * 3))
    assert found is not None
    assert isinstance(found.memory, kvpool_native.DeviceMemory)
    assert (found.addresses - np.uint64(found.memory.address)).tolist() == [0, 8192, 4096]
    assert (found.slots.tolist(), found.generations.tolist()) == ([11, 12, 13], [5, 0, 6])
    assert daemon.asked == ["open", "find 0"]


def test_an_answer_may_end_with_the_last_copy_and_a_long_lease_takes_several(device: kvpool_native.Device) -> None:
    chunks = dm.COPIES_MAX + 10
    daemon = Daemon(device, ([0] * 20, [1] * 20, [2] * 20))
    found = _copies(daemon, device, _rows([kv.Level.HBM] * chunks, first=5))
    assert found is not None
    assert found.generations.tolist() == [2] * 15 + [0] * (chunks - 20)
    assert daemon.asked == ["open", "find 5", f"find {5 + dm.COPIES_MAX}"]


def test_a_lease_without_copies_costs_one_request_in_a_session(device: kvpool_native.Device) -> None:
    daemon, tier = Daemon(device, ([], [], [])), TierMemory()
    for _ in range(3):
        assert tier.copies_of(daemon, _rows([kv.Level.DRAM] * 3), 64, device) is None  # type: ignore[arg-type]  # a stand-in
    assert daemon.asked == ["open"]


def test_a_daemon_without_a_device_is_not_asked_each_time(device: kvpool_native.Device) -> None:
    daemon, tier = Daemon(None), TierMemory()
    for _ in range(3):
        assert tier.copies_of(daemon, _rows([kv.Level.HBM]), 64, device) is None  # type: ignore[arg-type]  # a stand-in
    assert daemon.asked == ["open"]


@pytest.mark.parametrize(
    "columns",
    [
        ([1 << 30], [1], [1]),  # beyond the memory
        ([(1 << 21) - LAYOUT.chunk_bytes + 1], [1], [1]),
        ([0, 0], [1], [1]),
        ([0], [1], [0]),
        ([], [], []),
    ],
)
def test_answers_that_cannot_be_used_are_no_copies(device: kvpool_native.Device, columns: Any) -> None:
    assert _copies(Daemon(device, columns), device, _rows([kv.Level.HBM])) is None


@pytest.mark.parametrize("order", ["fail cuMemImportFromShareableHandle 0 999", "fail cuMemMap 0 2"])
def test_memory_that_the_driver_does_not_map_is_left_alone(device: kvpool_native.Device, order: str) -> None:
    daemon, descriptors = Daemon(device, ([0], [1], [1])), len(os.listdir("/proc/self/fd"))
    emulated.order(order)
    assert _copies(daemon, device, _rows([kv.Level.HBM])) is None
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "what earlier tests have left may be closed meanwhile"
