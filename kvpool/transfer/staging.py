"""Staging memory: a connection writes it and the daemon copies from it, on the way from engine to arena.

Each connection that saves gets one memfd at its first save, sealed against resizing and against further seals. It is freed when
the connection has ended and no copy reads it. No other connection gets its descriptor. The client may change the bytes at any
time, so a copy computes the checksum of the bytes that it stores and never reads them twice. Control thread only.
"""

import fcntl

import kvpool_native
from kvpool.ids import PAGE_BYTES, ConnectionId


class StagingAreas:
    """The staging memory of all connections: one area of `size_bytes` for each."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._areas: dict[ConnectionId, kvpool_native.Mapping] = {}

    def __repr__(self) -> str:
        return f"<StagingAreas {len(self._areas)} of {self.size_bytes} bytes>"

    def open(self, connection: ConnectionId) -> kvpool_native.Mapping:
        """The connection's area, made at the first call. Raises OSError where there is no memory."""
        area = self._areas.get(connection)
        if area is None:
            area = kvpool_native.Mapping.create("kvpool-staging", self.size_bytes)
            fcntl.fcntl(area.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
            self._areas[connection] = area
        return area

    def find(self, connection: ConnectionId) -> kvpool_native.Mapping | None:
        """The connection's area; None where it has none."""
        return self._areas.get(connection)

    def drop(self, connection: ConnectionId) -> None:
        """Drop the area of a connection that has ended. A running copy keeps the memory until it ends."""
        self._areas.pop(connection, None)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"staging_areas": len(self._areas), "staging_bytes": len(self._areas) * self.size_bytes}
