"""Signals of the daemon: once they are ignored, none is caught, none ends the process and none is reported as an error."""

import signal
import subprocess
import sys

IGNORED = """
import asyncio, os, signal
from pathlib import Path
from kvpool.server.signals import ALL, Signals

called = []
loop = asyncio.new_event_loop()
signals = Signals()
signals.catch(loop, stop=lambda: called.append("stop"), reload=lambda: called.append("reload"))

def send_all():
    for number in ALL:
        os.kill(os.getpid(), number)
    loop.run_until_complete(asyncio.sleep(0))
    print(*called)

def kernel_ignores(number):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) & 1 << number - 1)

send_all()
signals.ignore()
assert all(kernel_ignores(number) for number in ALL)
signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # as one that was under way
send_all()
signals.forget()
assert all(kernel_ignores(number) and signal.getsignal(number) == signal.SIG_IGN for number in ALL)
send_all()
"""


def test_signals_are_caught_until_they_are_ignored_to_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["reload stop stop"] * 3


HELD = """
import os, signal
from kvpool.server.signals import Signals

signals = Signals()
signals.hold()
os.kill(os.getpid(), signal.SIGTERM)
print("held", flush=True)
signals.end_at_once(lambda: print("left", flush=True))
print("goes on", flush=True)
"""


def test_a_signal_that_is_held_ends_the_process_when_it_may() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGTERM, ["held", "left"])
