"""Events of chunks, as a journal keeps them and readers get them. Their numbers are wire codes."""

from enum import IntEnum
from typing import NamedTuple

from kvpool.key_column import KeyColumn
from kvpool.states import DEFAULT_PRIORITY, NODE_TIERS, Level, level_of, levels_in


class EventKind(IntEnum):
    """Kind of an event."""

    CREATED = 0
    STORED = 1
    REMOVED = 2
    UPDATED = 3


class Cause(IntEnum):
    """Cause for which a chunk came to a tier or left it: the native module's codes."""

    OWN_CLASS = 0
    OTHER_CLASS = 1
    INDEX_FULL = 2
    FLUSHED = 3
    DROPPED = 4
    DISCARDED = 5
    LANDING_FAILED = 6
    STORED = 7
    PROMOTED = 8
    OTHER = 255  # never sent: a client's value for an unknown number


class Event(NamedTuple):
    """Something that happened to chunks, as `Pool.events` answers it. `id` rises by one, and a missing one is a gap; `kind` is
    an EventKind.

    CREATED: a daemon began, with room for `capacities` chunks, by level. STORED: chunks `keys`, each the parent of the next,
    came to `tiers` behind `parent` (empty: at the root). REMOVED: no tier has `keys`. UPDATED: one chunk has come to a further
    tier, left one of several, or has another priority.

    `keys` (32 bytes each) and `tokens` (int32 ids, of all keys or of none) are packed; `tiers` are bits by level (1 << Level),
    `priority` is 0 to 100; `tiers_before` and `priority_before` are those before an UPDATED, and `cause` is why the tiers
    changed. An UPDATED that gains a tier carries what a STORED does. `namespace` is a number of this life of the daemon; -1:
    none. `adapter` and `salt_tag` are known where the token ids are, and the same for all keys.
    """

    id: int
    kind: EventKind
    namespace: int = -1
    keys: bytes = b""
    parent: bytes = b""
    tokens: bytes = b""
    tiers: int = 0
    tiers_before: int = 0
    priority: int = DEFAULT_PRIORITY
    priority_before: int = DEFAULT_PRIORITY
    cause: Cause = Cause.STORED
    capacities: tuple[int, ...] = ()
    adapter: str = ""
    salt_tag: bytes = b""

    @property
    def chunks(self) -> tuple[bytes, ...]:
        """The keys one by one."""
        return tuple(self.column)

    @property
    def column(self) -> KeyColumn:
        """The keys as a column."""
        return KeyColumn(self.keys)

    @property
    def level(self) -> Level | None:
        """The fastest tier that has the chunks now."""
        return level_of(self.tiers)

    @property
    def level_before(self) -> Level | None:
        """The fastest tier that had them before."""
        return level_of(self.tiers_before)

    @property
    def gained(self) -> tuple[Level, ...]:
        """Tiers that have the chunks since this event."""
        return levels_in(self.tiers & ~self.tiers_before)

    @property
    def lost(self) -> tuple[Level, ...]:
        """Tiers that have lost the chunks with this event."""
        return levels_in(self.tiers_before & ~self.tiers)

    @property
    def is_of_node(self) -> bool:
        """Whether it is about tiers that the node can give chunks from, and changes more than level 0."""
        changed = self.tiers ^ self.tiers_before
        return bool((self.tiers | self.tiers_before) & NODE_TIERS) and (not changed or bool(changed & NODE_TIERS))


class StoredChunk(NamedTuple):
    """A chunk that `Pool.snapshot` found: its 32-byte `key`, and that of its `parent` (empty: at the root). `namespace`,
    `tiers`, `priority`, `tokens`, `adapter` and `salt_tag` mean the same as in an Event."""

    key: bytes
    parent: bytes
    namespace: int
    tiers: int
    priority: int
    tokens: bytes
    adapter: str = ""
    salt_tag: bytes = b""
