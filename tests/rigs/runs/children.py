"""Forked children of a test's own process."""

import contextlib
import os
import signal
import warnings
from collections.abc import Callable

ALARM_S = 60


def assert_in_child(check: Callable[[], object]) -> None:
    """In a child that is forked now the check is true, and it ends in time; nothing of the child's is run afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            signal.alarm(ALARM_S)
            code = 0 if check() else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
