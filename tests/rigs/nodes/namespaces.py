"""Network namespaces of a test: hosts with an address each, joined by veth pairs.

None has a name, and nothing is made in the machine's own namespace: a namespace lives as long as the processes in it, and these
end with the thread that started them, however that ends. Needs root.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from types import TracebackType

from tests.rigs.daemon import wait_until

PROGRAMS = ("ip", "nsenter", "unshare", "setpriv")
_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
# The command runs only if whoever starts it, the first argument, lives still: a signal asked for after its end never comes.
_IF_STARTED_BY = 'test "$PPID" = "$0" && exec "$@"'


def reason_to_skip() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root: network namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    command = ["unshare", "--net", "ip", "link", "add", "vtha", "type", "veth", "peer", "name", "vthb"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"needs network namespaces with veth: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One namespace. `address`: its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._devices: dict[str, str] = {}
        self._holder = subprocess.Popen([*mortal(), "unshare", "--net", "--", "sleep", "infinity"])
        path = f"/proc/{self._holder.pid}/ns/net"
        wait_until(lambda: os.readlink(path) != os.readlink(_OWN), "the host has a namespace of its own")
        self._space = os.open(path, os.O_RDONLY)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{address}/32", "dev", "lo")

    def __repr__(self) -> str:
        return f"<Host {self.address}>"

    def __enter__(self) -> "Host":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()
        os.close(self._space)

    @property
    def prefix(self) -> list[str]:
        """Before a command that is to run on this host, and to end with the test."""
        return [*mortal(), "nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def run(self, *command: str) -> None:
        """Run a command here."""
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is on this host: sockets that it makes, and threads that it starts, stay here."""
        former = os.open(_OWN, os.O_RDONLY)
        try:
            _enter(self._space)
            yield
        finally:
            _enter(former)
            os.close(former)

    def join(self, other: "Host") -> None:
        """Have a cable to another host, and a route to its address."""
        name = f"veth{len(self._devices)}"
        theirs = f"veth{len(other._devices)}"
        link = ("ip", "link", "add", name, "type", "veth", "peer", "name", theirs, "netns", str(other._holder.pid))
        self.run(*link)
        self._devices[other.address], other._devices[self.address] = name, theirs
        self.plug(other.address)
        other.plug(self.address)

    def unplug(self, address: str) -> None:
        """Pull out the cable to the host of this address, at this end: nothing gets through, and nobody is notified."""
        self.run("ip", "link", "set", self._devices[address], "down")

    def plug(self, address: str) -> None:
        """Put that cable in."""
        device = self._devices[address]
        self.run("ip", "link", "set", device, "up")
        self.run("ip", "route", "replace", f"{address}/32", "dev", device, "src", self.address)


def mortal() -> list[str]:
    """Before a command: it ends with the thread that starts it, also where that has ended before the command began."""
    return ["setpriv", "--pdeathsig", "KILL", "--", "sh", "-c", _IF_STARTED_BY, str(os.getpid())]


def _enter(space: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
