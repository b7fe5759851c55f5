"""Records about chunks of one group of a layout, or of all groups at once, and about the share of one rank. Fields as in
`messages`. Any thread."""

from dataclasses import dataclass
from typing import ClassVar

HOLDS_MAX = 4096  # of one lease: beyond, granting it would take longer than a turn


@dataclass(frozen=True, slots=True)
class ReserveGroup:
    """As Reserve, for chunks of one group. Those of windows and states have no parent: each is reserved alone. Answered by
    Reserved."""

    KIND: ClassVar[int] = 85
    group: int
    parent: bytes
    keys: bytes
    priorities: bytes
    durations: bytes


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """As Commit, for a reservation of ReserveGroup. Answered by Committed."""

    KIND: ClassVar[int] = 86
    group: int
    reservation: int
    checksums: bytes
    tokens: bytes
    scope: bytes


@dataclass(frozen=True, slots=True)
class ReserveShare:
    """As Reserve, for the extents of a share alone: of `layers` layers from `first_layer` on, `groups` head groups from
    `first_group` on. Answered by Reserved, where PART is a chunk that has these extents and lacks others. Commit has a
    checksum for each extent of the share.
    """

    KIND: ClassVar[int] = 87
    first_layer: int
    layers: int
    first_group: int
    groups: int
    parent: bytes
    keys: bytes
    priorities: bytes
    durations: bytes


@dataclass(frozen=True, slots=True)
class ReserveGroupShare:
    """As ReserveShare, for chunks of one group, which are named as for ReserveGroup. Answered by Reserved."""

    KIND: ClassVar[int] = 88
    group: int
    first_layer: int
    layers: int
    first_group: int
    groups: int
    parent: bytes
    keys: bytes
    priorities: bytes
    durations: bytes
