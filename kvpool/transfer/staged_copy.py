"""Staged copy from staging memory into reserved slots: an immutable job for the transfer threads.

Copies each byte once and computes the checksum in the same pass, so that it is of the stored bytes even if the client changes
the staging memory meanwhile. The caller keeps the slots from being reused while the job runs.
"""

from dataclasses import dataclass

import kvpool_native


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """Copy of `extents` extents to each of `targets`, u64 offsets in the arena. Their bytes begin at `offset` of `staging`."""

    arena: kvpool_native.Mapping
    targets: bytes
    staging: kvpool_native.Mapping
    offset: int
    extents: int
    extent_bytes: int

    def __call__(self) -> bytes:
        """The CRC-32C of what was stored, u32 [target][extent]."""
        return kvpool_native.copy_extents(
            self.arena, self.targets, self.staging, self.offset, self.extents, self.extent_bytes
        )
