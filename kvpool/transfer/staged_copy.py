"""Staged copy from staging memory into reserved slots: an immutable job for the transfer threads.

Copies per byte: one, checksummed in the same pass: the checksums are of the stored bytes, even if the writer of the staging
memory changes it meanwhile. The caller holds the slots while it runs.
"""

from dataclasses import dataclass

import kvpool_native


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """`layers` layers to each of `targets`, which follow one another in `staging` from `offset` on."""

    arena: kvpool_native.Mapping
    targets: tuple[int, ...]
    staging: kvpool_native.Mapping
    offset: int
    layers: int
    layer_bytes: int

    def __call__(self) -> bytes:
        """The CRC-32C of what was stored, u32 [target][layer]."""
        targets = b"".join(target.to_bytes(8, "little") for target in self.targets)
        return kvpool_native.copy_extents(self.arena, targets, self.staging, self.offset, self.layers, self.layer_bytes)
