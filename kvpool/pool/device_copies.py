"""Device copies: which engines are on the device of a tier of copies, and where the copies of their leased chunks are.

An engine that has opened the device has mapped the tier's memory: what it leases from then on is copied there (`CopyLink`), and
it may ask where the copies are. Without such a tier it is the null object: nobody opens a device. Control thread only."""

from collections.abc import Sequence

from kvpool.errors import ProtocolError, Refused
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.leases import Lease
from kvpool.index.sessions import EngineSession
from kvpool.pool.readers.readers import Readers, Taken, holds_of
from kvpool.protocol.columns import NUMBER_BYTES
from kvpool.protocol.records import device as dm
from kvpool.protocol.records import memory as mm
from kvpool.protocol.verbs import ENGINE, verb
from kvpool.tiering.copies.copy_link import CopyLink

NOTHING = dm.Copies(b"", b"", b"")


class DeviceCopies:
    """See the module. `links`: to tiers of copies, one at most."""

    def __init__(self, links: Sequence[CopyLink], readers: Readers) -> None:
        self._links = links
        self._readers = readers
        self.on_device: set[ConnectionId] = set()  # of engines that may have copies

    def __repr__(self) -> str:
        return f"<DeviceCopies for {len(self.on_device)} connections>"

    @property
    def connections(self) -> int:
        """Connections of engines on the device."""
        return len(self.on_device)

    def open(self, session: EngineSession, uuid: bytes) -> tuple[mm.Memory, int]:
        """The tier's memory for an engine on the device of this UUID: the answer, and its descriptor. Raises ProtocolError,
        Refused."""
        if len(uuid) != mm.UUID_BYTES:
            raise ProtocolError(f"uuid has {len(uuid)} bytes, expected {mm.UUID_BYTES}")
        if session.is_peer:
            raise Refused("device", "another node has no device of this one")
        for link in self._links:
            memory = link.tier.export()
            if memory is None:
                raise Refused("device", f"the {link.tier.name} tier is not in use now: kvpoolctl info says why")
            if memory.uuid != uuid:
                raise Refused("device", f"the engine is on device {uuid.hex()}, the daemon's is {memory.uuid.hex()}")
            self.on_device.add(session.connection)
            return mm.Memory(memory.uuid, memory.size), memory.fd
        raise Refused("device", "this daemon keeps no copies in device memory")

    @verb(dm.FindCopies, roles=ENGINE)
    def find_copies(self, session: EngineSession, request: dm.FindCopies) -> dm.Copies:
        """Where the copies of a lease's chunks are now. Nothing where the lease has ended, or the engine has opened no
        device."""
        if request.first < 0:
            raise ProtocolError(f"first is {request.first}, expected 0 or more")
        holds = self._holds_of(session, self._readers.find(session, request.lease))
        for link in self._links:
            if link.tier.can_copy and holds:
                return _rows(link, [(hold, size) for _, hold, size in holds], request.first)
        return NOTHING

    def note_lease(self, session: EngineSession, lease: Lease | Taken) -> None:
        """A connection was granted a lease, or tickets: what has no copy of it is copied, if its engine is on the device."""
        for group, hold, _ in self._holds_of(session, lease):
            for link in self._links:
                link.note_lease(group.own, hold, is_set=lease.set_group is not None)

    def _holds_of(self, session: EngineSession, lease: Lease | Taken | None) -> list[tuple[EngineSession, HoldId, int]]:
        """The holds of a rank's lease, where its engine is on the device: see `holds_of`."""
        if lease is None or session.connection not in self.on_device:
            return []
        return holds_of(session, lease, session.layout.rank)

    def drop_owner(self, connection: ConnectionId) -> None:
        """A connection has ended."""
        self.on_device.discard(connection)


def _rows(link: CopyLink, holds: Sequence[tuple[HoldId, int]], first: int) -> dm.Copies:
    """The rows of these holds' chunks, of one hold after the other, from row `first` on up to the last one with a copy.
    `holds`: that of each group, and how many chunks it has."""
    offsets, slots, generations = bytearray(), bytearray(), bytearray()
    left = dm.COPIES_MAX
    for hold, count in holds:
        if first < count and left > 0:
            found = link.find(hold)
            rows = slice(first * NUMBER_BYTES, (first + left) * NUMBER_BYTES)
            offsets += found.offsets[rows]
            slots += found.slots[rows]
            generations += found.generations[rows]
            left -= min(count - first, left)
        first = max(0, first - count)
    end = -(-len(generations.rstrip(b"\0")) // NUMBER_BYTES) * NUMBER_BYTES  # behind the last that is not 0
    return dm.Copies(bytes(offsets[:end]), bytes(slots[:end]), bytes(generations[:end]))
