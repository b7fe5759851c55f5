"""Tests of the hosts themselves: nothing of them outlives the test, however that ends."""

from pathlib import Path

from tests.rigs.daemon import spawn, wait_until

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
        wait_until(lambda: not any(_is_running(pid) for pid in pids), "both have ended")


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
