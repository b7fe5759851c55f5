"""The device tier's memory as clients see it: mapped for reading, once for each session and device.

The daemon has copies of chunks there, which nobody holds: `Sources` says when one counts. It copies what engines lease that
have opened the device, so that is done at a session's first load onto it. Where there is no such tier now, or it is on another
device, the daemon is asked again after OPEN_RETRY_S. Any thread. Lock: `_lock` guards `_memory`, and is not held while a
request is under way.
"""

import os
import threading

import numpy as np
import numpy.typing as npt

import kvpool_native
from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.protocol.records import device as dm
from kvpool.states import Level
from kvpool_client.connection.session import Session
from kvpool_client.copying.device.sources import DeviceCopies
from kvpool_client.verbs.leased_rows import LeasedRows

OPEN_RETRY_S = 30.0


class TierMemory:
    """Of one session, which the calls are given. Invariant: memory that was mapped once stays mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, kvpool_native.DeviceMemory] = {}  # guarded by _lock; by the device's ordinal
        self._refused: dict[int, Deadline] = {}  # guarded by _lock; until when nobody asks again

    def __repr__(self) -> str:
        return f"<TierMemory on devices {sorted(self._memory)}>"

    def copies_of(
        self, session: Session, rows: LeasedRows, stored_bytes: int, device: kvpool_native.Device
    ) -> DeviceCopies | None:
        """The copies of leased chunks of so many bytes each, on this device; None where there are none. Two round trips at
        most, more for thousands of chunks. Never raises: without copies everything comes from the arena."""
        memory = self._memory_on(session, device)
        if memory is None or Level.HBM not in rows.tiers:
            return None
        try:
            offsets, slots, generations = _found(session, rows)
        except (KVPoolError, ValueError):  # the session has ended, or columns that are none
            return None
        # A copy from beyond the memory would end the engine's context.
        generations[offsets > max(0, memory.size - stored_bytes)] = 0
        if not generations.any():
            return None
        return DeviceCopies(memory, offsets + np.uint64(memory.address), slots, generations)

    def _memory_on(self, session: Session, device: kvpool_native.Device) -> kvpool_native.DeviceMemory | None:
        number = device.ordinal
        with self._lock:
            if number in self._memory:
                return self._memory[number]
            if number in self._refused and not self._refused[number].has_passed():
                return None
            self._refused[number] = Deadline(OPEN_RETRY_S)
        memory = _opened(session, device)
        if memory is None:
            return None
        with self._lock:
            return self._memory.setdefault(number, memory)


def _found(session: Session, leased: LeasedRows) -> npt.NDArray[np.uint64]:
    """Columns of offsets, slots and generations, a row for each chunk. Raises KVPoolError or ValueError."""
    chunks = len(leased)
    columns = np.zeros((3, chunks), np.uint64)
    for first in range(0, chunks, dm.COPIES_MAX):
        answer = session.call(dm.FindCopies(*leased.place_of(first)), dm.Copies)
        rows = np.array([np.frombuffer(words, "<u8") for words in (answer.offsets, answer.slots, answer.generations)])
        own = rows[:, : chunks - first]  # behind them are rows of the next group
        columns[:, first : first + own.shape[1]] = own
    return columns


def _opened(session: Session, device: kvpool_native.Device) -> kvpool_native.DeviceMemory | None:
    try:
        answer, fd = session.open_device(device.uuid)
    except KVPoolError:  # no such tier, or the session has ended
        return None
    try:
        return device.attach(fd, answer.memory_bytes) if answer.uuid == device.uuid else None
    except (RuntimeError, ValueError):  # the driver cannot map it
        return None
    finally:
        os.close(fd)
