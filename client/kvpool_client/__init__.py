"""Thin client of kvpool: look a prompt up, load what is stored, save what is new.

pool = kvpool_client.connect("/run/kvpool/kvpool.sock", model="llama-3-8b", revision="5f0b02c", layout=layout)

Importing it loads the standard library, msgpack, numpy and the native module: no engine, no torch.
"""

from kvpool import __version__
from kvpool.errors import InvalidArgument, KVPoolError, LayoutMismatch
from kvpool.events import Event, EventKind, StoredChunk
from kvpool.layout import Layout
from kvpool.layouts.groups import Group
from kvpool.layouts.share import Share
from kvpool.states import Level, TokenRange
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.leased_memory import LeasedMemory
from kvpool_client.events import BEGINNING, EventBatch, EventMark, SnapshotPart
from kvpool_client.hint_envelope import HintReport
from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool, connect
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.results import AnnounceResult, Hit, LoadResult, RetainResult, SaveResult
from kvpool_client.verbs.save import Save

__all__ = [
    "BEGINNING",
    "AnnounceResult",
    "Cache",
    "Event",
    "EventBatch",
    "EventKind",
    "EventMark",
    "Group",
    "HintReport",
    "Hit",
    "InvalidArgument",
    "KVPoolError",
    "KeyChain",
    "Layout",
    "LayoutMismatch",
    "Lease",
    "LeasedMemory",
    "Level",
    "Load",
    "LoadResult",
    "Pool",
    "RetainResult",
    "Save",
    "SaveResult",
    "Share",
    "SnapshotPart",
    "StoredChunk",
    "TokenRange",
    "__version__",
    "connect",
]
