"""Staging memory: a connection writes it and the daemon copies from it, on the way from engine to arena.

One memfd for each connection that saves, made at its first save, sealed against resizing and against further seals, freed
with the connection once no copy out of it is under way. Only its own connection gets the descriptor. Its bytes may change
at any time: a copy from here checks the bytes that it stored, not those that it read before. Control thread only.
"""

import fcntl

import kvpool_native
from kvpool.types import PAGE_BYTES, ConnectionId


class StagingAreas:
    """The staging memory of all connections. Bounds: `size_bytes` each, one for a connection."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._areas: dict[ConnectionId, kvpool_native.Mapping] = {}

    def __repr__(self) -> str:
        return f"<StagingAreas {len(self._areas)} of {self.size_bytes} bytes>"

    def open(self, connection: ConnectionId) -> kvpool_native.Mapping:
        """The connection's area, made where it has none. Raises OSError where there is no memory."""
        area = self._areas.get(connection)
        if area is None:
            area = kvpool_native.Mapping.create("kvpool-staging", self.size_bytes)
            fcntl.fcntl(area.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
            self._areas[connection] = area
        return area

    def find(self, connection: ConnectionId) -> kvpool_native.Mapping | None:
        """The connection's area, where it has one."""
        return self._areas.get(connection)

    def drop(self, connection: ConnectionId) -> None:
        """Drop the area of a connection that has ended; a copy under way keeps the memory for as long as it runs."""
        self._areas.pop(connection, None)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"staging_areas": len(self._areas), "staging_bytes": len(self._areas) * self.size_bytes}
