"""The limit of a process's address space, named where memory, threads or libraries cannot be had for it.

Pure but for reading the limit. Any thread.
"""

import resource

from kvpool.units import format_size

# Python's text where the kernel refuses a thread: it raises a plain RuntimeError.
NO_THREAD = "can't start new thread"


def limit_note() -> str:
    """A clause about the limit, and what to do about it; empty where there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"; the process may have {format_size(limit)} of address space: raise or remove the limit (ulimit -v, LimitAS)"
    )
