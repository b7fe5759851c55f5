"""Event records: events, snapshots, chunk history, the names of namespaces.

As in `messages`, whose numbers continue here; `router_events.columns` defines the columns. Any thread.
"""

from dataclasses import dataclass
from typing import ClassVar

HISTORY_KEYS_MAX = 256


@dataclass(slots=True, unsafe_hash=True)
class AskEvents:
    """The events after id `last` (-1: from the first) of an incarnation (empty: the present one).

    An operator may wait `wait_s` for the next one; an engine is answered at once. Answered by Events.
    """

    KIND: ClassVar[int] = 40
    incarnation: bytes
    last: int
    wait_s: float


@dataclass(slots=True, unsafe_hash=True)
class Events:
    """Some events (see `router_events/columns.py`), up to id `last`, and the namespaces that they name.

    After a gap there are none, and `last` is the newest id: a snapshot has what is stored. `oldest`: the first id in the log.
    """

    KIND: ClassVar[int] = 41
    incarnation: bytes
    last: int
    oldest: int
    is_gap: bool
    events: bytes
    namespaces: bytes


@dataclass(slots=True, unsafe_hash=True)
class AskSnapshot:
    """Some stored chunks; `cursor` 0 begins. Answered by SnapshotPage."""

    KIND: ClassVar[int] = 42
    cursor: int


@dataclass(slots=True, unsafe_hash=True)
class SnapshotPage:
    """Some chunks as they are at event `as_of`; `cursor` asks for more, -1 when there are none.

    A reader that applies the events up to `as_of` first and then the chunks, page after page, has the pool's state.
    """

    KIND: ClassVar[int] = 43
    incarnation: bytes
    as_of: int
    cursor: int
    chunks: bytes
    namespaces: bytes


@dataclass(slots=True, unsafe_hash=True)
class AskChunkHistory:
    """The history of chunks: `keys`, HISTORY_KEYS_MAX at most. Answered by Report."""

    KIND: ClassVar[int] = 44
    keys: bytes


@dataclass(slots=True, unsafe_hash=True)
class AskNamespaces:
    """The namespaces from number `first` on, as many as fit. Answered by NamespaceList."""

    KIND: ClassVar[int] = 45
    first: int


@dataclass(slots=True, unsafe_hash=True)
class NamespaceList:
    """Namespaces (see `router_events/columns.py`); none when there are no more."""

    KIND: ClassVar[int] = 46
    namespaces: bytes
