"""Objects of the shared store: the name and the value of a chunk.

    name  := "kvpool/1/" namespace (16 hex digits) "/" key (64 hex digits)
    value := header (as of a slot on disk: docs/ssd-format.md) chunk (its extents one after another)

Everybody who reaches the store can put anything under any name, so a value counts only where its header is this chunk's and
every extent's checksum fits. Nothing here leaves out a comparison. Pure functions; any thread.
"""

import kvpool_native
from kvpool.index.namespaces import Namespace
from kvpool.keys import namespace_fingerprint

# In the place of a pool's epoch: the chunks of a store belong to no set of segment files.
EPOCH = b"kvpool store 1\0\0"
_PREFIX = "kvpool/1/"
_NAMESPACE_DIGITS = 16


class ObjectForm:
    """The objects of one namespace's chunks."""

    __slots__ = ("_fingerprint", "_prefix", "extent_bytes", "extents", "header_bytes", "namespace", "object_bytes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        layout = namespace.layout
        self._fingerprint = namespace_fingerprint(namespace.model, layout)
        self._prefix = f"{_PREFIX}{self._fingerprint.hex()[:_NAMESPACE_DIGITS]}/"
        self.extents = layout.extents
        self.extent_bytes = layout.extent_bytes
        self.header_bytes = kvpool_native.ssd_header_bytes(layout.extents)
        self.object_bytes = self.header_bytes + layout.stored_bytes

    def name_of(self, key: bytes) -> str:
        """The name of a chunk's object."""
        return self._prefix + key.hex()

    def header_of(self, key: bytes, checksums: bytes) -> bytes:
        """The header of a chunk with these CRC-32C of its extents, u32."""
        return kvpool_native.encode_ssd_header(EPOCH, key, self._fingerprint, self.extent_bytes, checksums)

    def checksums_in(self, page: bytes, key: bytes) -> bytes:
        """The checksums that a header names for this chunk; empty where it is not this chunk's."""
        header = kvpool_native.decode_ssd_header(page)
        if header is None or header.epoch != EPOCH:
            return b""
        if header.key != key or header.namespace != self._fingerprint:
            return b""
        if (header.extents, header.extent_bytes) != (self.extents, self.extent_bytes):
            return b""
        return header.checksums
