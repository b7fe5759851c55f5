"""The life of a child process that does not serve yet."""

import asyncio
import random
import sys

import pytest

from kvpool.transfer.child.process import ChildProcess, ChildTask
from tests.rigs.transfer.engine_pair import until

pytestmark = pytest.mark.asyncio

NEVER_SERVES = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as daemon:
    while daemon.recv(4096):
        pass
"""


def never_serving(start_s: float) -> ChildProcess:
    task = ChildTask("the library", (sys.executable, "-c", NEVER_SERVES), start_s=start_s)
    return ChildProcess(task, {}, 4096, random=random.Random(1), on_change=lambda: None)


async def test_a_close_while_it_starts_is_no_fault_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    child = never_serving(60.0)
    child.start()
    await until(lambda: child.process is not None, "the process runs")
    assert await asyncio.wait_for(child.close(), 30.0)
    assert (child.error, caplog.messages) == ("", [])


async def test_a_process_that_does_not_serve_in_time_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    child = never_serving(0.05)
    child.start()
    await until(lambda: child.error, "the process is given up")
    assert await asyncio.wait_for(child.close(), 30.0)
    assert caplog.messages == ["the library cannot be used: it took too long to start"]
