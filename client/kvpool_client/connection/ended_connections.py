"""Ended connections of this process: its next hello, of any Pool, names them, so that a daemon that has taken over the memory
gives away what was reserved for them.

Whoever adds one has stopped its saves. What a daemon has long seen end is named, too, and means nothing to it; the oldest are
left out, and what a daemon still withholds for them waits for the end of the process. Any thread; without locks, for forks: a
child inherits them, and is not believed, being another process.
"""

import os
from collections import deque

from kvpool.protocol import columns
from kvpool.protocol.records import messages as m

_ended: dict[str, deque[bytes]] = {}  # by the daemon's socket, whatever it is called


def add_ended(path: str, welcome: m.Welcome) -> None:
    """A connection to the daemon at `path` writes nothing any more. Idempotent."""
    row = columns.pack_ended(welcome.connection, welcome.proof)
    rows = _ended.setdefault(os.path.realpath(path), deque(maxlen=m.ENDED_MAX))
    if row not in rows.copy():
        rows.append(row)


def ended_connections(path: str) -> bytes:
    """The column of a hello to `path`: ENDED_MAX at most, the last one at the end."""
    return b"".join(_ended.get(os.path.realpath(path), deque()).copy())
