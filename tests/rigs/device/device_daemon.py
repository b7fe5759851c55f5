"""A daemon with a device tier on the emulated driver, and an engine on the same device that speaks the protocol itself."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

import kvpool_native
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import device as dm
from kvpool.protocol.records import memory as mm
from kvpool.protocol.records import messages as m
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.device.emulated import Control, driver_path, environment
from tests.rigs.dropping import drop_leases
from tests.rigs.payload import chunk_bytes_of

TIMEOUT_S = 10.0
COPIED_S = 30.0


class DeviceDaemon(Daemon):
    """A daemon whose device tier is on device 0 of the emulated driver; not started. `control`: orders to its driver."""

    def __init__(self, directory: Path, **options: str) -> None:
        tier = {"hbm.device": "cuda:0", "hbm.driver": driver_path(), "hbm.capacity": "2MiB"}
        super().__init__(directory, **{**tier, **options})
        self.control = Control(directory / "orders")
        self.environment = {**environment(), **self.control.environment}

    def __enter__(self) -> "DeviceDaemon":
        super().__enter__()
        return self

    def wait_for_state(self, state: str) -> None:
        """Until the tier is in a state."""
        wait_until(lambda: self.info()["hbm_state"] == state, f"the device tier is {state}", COPIED_S)

    def wait_for_copies(self, chunks: int) -> None:
        """Until so many chunks have copies, and nothing is copied."""

        def are_there() -> bool:
            counted = self.stats()
            is_moving = counted["hbm.promoting_bytes"] or counted["hbm.waiting_prefixes"]
            return counted["hbm.chunks"] == chunks and not is_moving

        wait_until(are_there, f"{chunks} copies", COPIED_S)

    def empty(self) -> None:
        """As it was at its start, but for what it has counted: for the next test of a module."""
        self.control.order("clear 1")
        with self.admin() as admin:
            wait_until(lambda: not self._in_use(), "nothing of another test is under way", COPIED_S)
            admin.flush(None, None, "")
        assert (self.stats()["hbm.chunks"], self.stats()["dram.chunks"]) == (0, 0)

    def _in_use(self) -> int:
        counted = self.stats()
        names = ("leases", "reservations", "dram.zombie_slots", "hbm.promoting_bytes", "hbm.waiting_prefixes")
        return sum(int(counted[name]) for name in names)

    @property
    def uuid(self) -> bytes:
        """The UUID of its device, as soon as the daemon has opened it."""
        wait_until(lambda: "hbm_uuid" in self.info(), "the device is open", COPIED_S)
        return bytes.fromhex(self.info()["hbm_uuid"].removeprefix("GPU-").replace("-", ""))


class ForkedDeviceDaemon(DeviceDaemon):
    """One whose driver has its defaults and takes no orders: it starts as quickly as a daemon without a device."""

    def __init__(self, directory: Path, **options: str) -> None:
        super().__init__(directory, **options)
        self.environment = {}


class DeviceEngine:
    """An engine's connection that has opened the device: leases chains, finds their copies, and reads them from the device."""

    def __init__(self, daemon: DeviceDaemon) -> None:
        hello = m.Hello(m.MAGIC, m.PROTOCOL_VERSION, m.ROLE_ENGINE, "test-model", SMALL.to_wire())
        self.connection = BlockingConnection(daemon.socket, hello, TIMEOUT_S)
        self.arena, fd = self.connection.call_for_descriptor(mm.OpenMemory(daemon.uuid), mm.Memory)
        self._device = kvpool_native.Device(driver_path(), 0)
        self.memory = self._device.attach(fd, self.arena.memory_bytes)
        os.close(fd)
        self._stream = self._device.stream()

    def __enter__(self) -> "DeviceEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.connection.close()

    def lease(self, keys: Sequence[bytes]) -> m.Leased:
        """A lease of a chain."""
        return self.connection.call(m.Acquire(b"".join(keys)), m.Leased)

    def release(self, leased: m.Leased) -> None:
        """End a lease."""
        drop_leases(self.connection, leased.lease)

    def copies_of(self, leased: m.Leased, first: int = 0) -> list[tuple[int, int, int]]:
        """Offset, slot and generation of each copy of a lease's chunks from number `first` on."""
        found = self.connection.call(dm.FindCopies(leased.lease, first), dm.Copies)
        columns = (np.frombuffer(column, "<u8").tolist() for column in (found.offsets, found.slots, found.generations))
        return list(zip(*columns, strict=True))

    def read(self, offset: int) -> bytes:
        """The bytes of a copy, over the device's own copy engine."""
        target = np.zeros(SMALL.chunk_bytes, np.uint8)
        address, size = np.array([target.ctypes.data], "<u8"), np.array([target.nbytes], "<u8")
        source = np.array([self.memory.address + offset], "<u8")
        self._stream.copy(address.tobytes(), source.tobytes(), size.tobytes())
        assert self._stream.record().wait(TIMEOUT_S)
        return target.tobytes()

    def use(self, keys: Sequence[bytes]) -> int:
        """Lease a chain, compare the bytes of all copies with what their keys say, and release: how many leading copies."""
        leased = self.lease(keys)
        rows = self.copies_of(leased) if leased.lease else []
        count = next((at for at, row in enumerate(rows) if not row[2]), len(rows))
        for key, (offset, _, _) in zip(keys, rows[:count], strict=False):
            assert self.read(offset) == chunk_bytes_of(key, SMALL.chunk_bytes).tobytes(), "a copy has wrong bytes"
        if leased.lease:
            self.release(leased)
        return count
