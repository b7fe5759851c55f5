"""Teams of native threads that compute steps: one for each Pool and number of threads, shared by its sequences.

Any thread. Lock: `_lock` guards the teams.
"""

import os
import threading
import weakref

import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool_client.pool import Pool

THREADS_MAX = 64

_lock = threading.Lock()
_teams: "weakref.WeakKeyDictionary[Pool, dict[int, kvpool_native.WorkerTeam]]" = weakref.WeakKeyDictionary()


def team_of(pool: Pool, threads: int | None) -> kvpool_native.WorkerTeam:
    """The team of a Pool's sequences; `threads` None: as many as this process may use. Raises InvalidArgument."""
    count = min(THREADS_MAX, len(os.sched_getaffinity(0))) if threads is None else threads
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= THREADS_MAX:
        raise InvalidArgument(f"threads is {threads!r}, expected 1..{THREADS_MAX}")
    with _lock:
        teams = _teams.setdefault(pool, {})
        if count not in teams:
            teams[count] = kvpool_native.WorkerTeam(count)
        return teams[count]
