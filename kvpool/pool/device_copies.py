"""Device copies: which engines are on the device of a tier of copies, and where the copies of their leased chunks are.

An engine that has opened the device has mapped the tier's memory: what it leases from then on is copied there (`CopyLink`), and
it may ask where the copies are. Without such a tier it is the null object: nobody opens a device. Control thread only."""

from collections.abc import Sequence

import numpy as np

from kvpool.errors import ProtocolError, Refused
from kvpool.index.sessions import EngineSession
from kvpool.pool.readers.readers import Readers
from kvpool.protocol.records import device as dm
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.tiering.copies.copy_link import CopyLink
from kvpool.types import ConnectionId, HoldId

NOTHING = dm.Copies(b"", b"", b"")
WORD_BYTES = 8


class DeviceCopies:
    """See the module. `links`: to tiers of copies, one at most."""

    def __init__(self, links: Sequence[CopyLink], readers: Readers) -> None:
        self._links = links
        self._readers = readers
        self._connections: set[ConnectionId] = set()

    def __repr__(self) -> str:
        return f"<DeviceCopies for {len(self._connections)} connections>"

    @property
    def connections(self) -> int:
        """Connections of engines on the device."""
        return len(self._connections)

    def open(self, session: EngineSession, uuid: bytes) -> tuple[dm.DeviceArena, int]:
        """The tier's memory for an engine on the device of this UUID: the answer, and its descriptor. Raises ProtocolError,
        Refused."""
        if len(uuid) != dm.UUID_BYTES:
            raise ProtocolError(f"uuid has {len(uuid)} bytes, expected {dm.UUID_BYTES}")
        if session.is_peer:
            raise Refused("device", "another node has no device of this one")
        if session.groups:
            raise Refused("device", "chunks of a layout with groups have no copies in device memory")
        for link in self._links:
            memory = link.tier.export()
            if memory is None:
                raise Refused("device", f"the {link.tier.name} tier is not in use now: kvpoolctl info says why")
            if memory.uuid != uuid:
                raise Refused("device", f"the engine is on device {uuid.hex()}, the daemon's is {memory.uuid.hex()}")
            self._connections.add(session.connection)
            return dm.DeviceArena(memory.uuid, memory.size), memory.fd
        raise Refused("device", "this daemon keeps no copies in device memory")

    @verb(dm.FindCopies, roles=ENGINE)
    def find_copies(self, session: EngineSession, request: dm.FindCopies) -> dm.Copies:
        """Where the copies of a lease's chunks are now. Nothing where the lease has ended, or the engine has opened no
        device."""
        if request.first < 0:
            raise ProtocolError(f"first is {request.first}, expected 0 or more")
        lease = self._readers.find(session, request.lease)
        if lease is None or session.connection not in self._connections or session.layout.rank not in lease.holds:
            return NOTHING
        for link in self._links:
            if link.tier.can_copy:
                return _rows(link, lease.holds[session.layout.rank], request.first)
        return NOTHING

    def note_lease(self, session: EngineSession, lease_id: int) -> None:
        """A connection was granted a lease: what has no copy of it is copied, if its engine is on the device."""
        if session.connection not in self._connections:
            return
        lease = self._readers.find(session, lease_id)
        if lease is None or session.layout.rank not in lease.holds:
            return
        for link in self._links:
            link.note_lease(session.own, lease.holds[session.layout.rank])

    def drop_owner(self, connection: ConnectionId) -> None:
        """A connection has ended."""
        self._connections.discard(connection)


def _rows(link: CopyLink, hold: HoldId, first: int) -> dm.Copies:
    """The rows of a hold's chunks from number `first` on, up to the last one that has a copy."""
    found = link.find(hold)
    part = slice(first * WORD_BYTES, (first + dm.COPIES_MAX) * WORD_BYTES)
    with_copies = np.flatnonzero(np.frombuffer(found.generations[part], "<u8"))
    rows = slice(part.start, part.start + (int(with_copies[-1]) + 1) * WORD_BYTES if len(with_copies) else part.start)
    return dm.Copies(found.offsets[rows], found.slots[rows], found.generations[rows])
