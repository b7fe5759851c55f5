"""Signals of the daemon: once they are ignored, none is caught, none ends the process and none is reported as an error."""

import subprocess
import sys

IGNORED = """
import asyncio, os, signal
from pathlib import Path
from kvpool.server.signals import catch_signals, ignore_signals

called = []
loop = asyncio.new_event_loop()
catch_signals(loop, stop=lambda: called.append("stop"), reload=lambda: called.append("reload"))
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
loop.run_until_complete(asyncio.sleep(0))
print(*called)

def kernel_ignores(number):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) & 1 << number - 1)

python_ignores = signal.signal

def checked(number, handler):
    assert kernel_ignores(number), number
    return python_ignores(number, handler)

signal.signal = checked
ignore_signals()
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    assert signal.getsignal(number) == signal.SIG_IGN
    os.kill(os.getpid(), number)
loop.run_until_complete(asyncio.sleep(0))
print(*called)
"""


def test_signals_are_caught_until_they_are_ignored_to_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["reload stop stop"] * 2
