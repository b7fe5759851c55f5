"""Limits of a process, named where they bite: of its address space, where memory, threads or libraries cannot be had for it,
and of its file descriptors.

Pure but for reading the limits. Any thread.
"""

import errno
import os
import resource

from kvpool.units import format_size

# Python's text where the kernel refuses a thread: it raises a plain RuntimeError.
NO_THREAD = "can't start new thread"


# Of errors that have no number, as Python's and LMDB's.
_MEMORY_TEXTS = (NO_THREAD, os.strerror(errno.ENOMEM), os.strerror(errno.EAGAIN))


def describe(error: BaseException) -> str:
    """An error's text, with a note about the limit where it may be for want of memory, threads or file descriptors."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raised = f" (it may raise that to {hard})" if hard != soft else ""
        return (
            f"{error}; the process may have {soft} file descriptors{raised}: raise the limit (ulimit -n, LimitNOFILE)"
        )
    is_memory_error = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    text = str(error) or ("out of memory" if is_memory_error else type(error).__name__)
    return text + limit_note() if is_memory_error or any(one in text for one in _MEMORY_TEXTS) else text


def limit_note() -> str:
    """A clause about the limit, and what to do about it; empty where there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"; the process may have {format_size(limit)} of address space: raise or remove the limit (ulimit -v, LimitAS)"
    )
