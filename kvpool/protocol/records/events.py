"""The records that travel about chunks that come and go: events, snapshots, fates, the names of namespaces.

As those of `messages`, whose numbers go on here; `router_events.columns` says what the columns hold. Any thread.
"""

from dataclasses import dataclass
from typing import ClassVar

HISTORY_KEYS_MAX = 256


@dataclass(frozen=True, slots=True)
class AskEvents:
    """The events behind id `last` (-1: from the first) of an incarnation (empty: this one, whichever it is).

    An operator may wait `wait_s` for the next one; an engine is answered at once. Answered by Events.
    """

    KIND: ClassVar[int] = 40
    incarnation: bytes
    last: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Events:
    """Some events (see `event_columns`), up to id `last`, and the namespaces that they name.

    After a gap there are none, and `last` is the newest id: what is stored a snapshot tells. `oldest`: the first id kept.
    """

    KIND: ClassVar[int] = 41
    incarnation: bytes
    last: int
    oldest: int
    is_gap: bool
    events: bytes
    namespaces: bytes


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Some chunks that the pool has; `cursor` 0 begins. Answered by SnapshotPage."""

    KIND: ClassVar[int] = 42
    cursor: int


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Some chunks as they are at event `as_of`; `cursor` asks for more, -1 when there are none.

    Whoever applies the events up to `as_of` first and then the chunks, page after page, has what the pool has.
    """

    KIND: ClassVar[int] = 43
    incarnation: bytes
    as_of: int
    cursor: int
    chunks: bytes
    namespaces: bytes


@dataclass(frozen=True, slots=True)
class AskChunkHistory:
    """What became of chunks: `keys`, FATES_MAX at most. Answered by Report."""

    KIND: ClassVar[int] = 44
    keys: bytes


@dataclass(frozen=True, slots=True)
class AskNamespaces:
    """The namespaces from number `first` on, as many as fit. Answered by NamespaceList."""

    KIND: ClassVar[int] = 45
    first: int


@dataclass(frozen=True, slots=True)
class NamespaceList:
    """Namespaces (see `event_columns`); none when there are no more."""

    KIND: ClassVar[int] = 46
    namespaces: bytes
