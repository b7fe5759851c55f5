"""Tests of the hosts themselves: nothing of them outlives the test, however that ends."""

import ast
import os
import subprocess
from pathlib import Path

from tests.rigs.daemon import spawn, wait_until
from tests.rigs.nodes.namespaces import mortal
from tests.rigs.runs.processes import is_running

CODE = """
import subprocess, sys
from tests.rigs.nodes.namespaces import Host
host = Host("10.9.0.1")
busy = subprocess.Popen([*host.prefix, "sleep", "infinity"])
print(host._holder.pid, busy.pid)
sys.stdin.readline()
"""


def test_hosts_and_what_runs_there_end_with_a_test_that_is_killed() -> None:
    with spawn(CODE) as test:
        assert test.stdout is not None
        pids = test.stdout.readline().split()
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        test.kill()
        wait_until(lambda: not any(is_running(int(pid)) for pid in pids), "both have ended")


def test_nothing_begins_for_a_test_that_ended_before_it_could_ask_to_end_with_it() -> None:
    with spawn("from tests.rigs.nodes.namespaces import mortal; print(mortal())") as ended:
        assert ended.stdout is not None
        prefix = ast.literal_eval(ended.stdout.readline())
    assert subprocess.run([*prefix, "echo", "it runs"], capture_output=True, check=False).stdout == b""
    assert prefix[-1] != str(os.getpid())
    assert subprocess.run([*mortal(), "echo", "it runs"], capture_output=True, check=True).stdout == b"it runs\n"
