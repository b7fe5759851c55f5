"""A daemon whose memory is kept, by a process of its own or by a service manager's descriptor store, until the test ends."""

import array
import contextlib
import fcntl
import os
import select
import socket
import subprocess
from pathlib import Path

from kvpool.index.holders import Process, has_ended
from kvpool.server.keeping.keeper_process import FILES_MAX
from kvpool.server.keeping.own_keeper import OwnKeeper, drop_everything
from kvpool.tiers.dram.kept.keeper import KeeperFault
from tests.rigs.daemon import Daemon, wait_until

KEEP_FOR = "10m"
FIRST = 3  # the first descriptor that a service manager passes
ABOVE = 100
# Puts number and descriptors where a service manager would, and becomes the daemon.
BECOME = 'export LISTEN_PID=$$; exec {moves}; exec "$@"'


class KeptDaemon(Daemon):
    """One kvpoold after another, whose memory a keeper process has; it ends with the last one."""

    def __init__(self, directory: Path, **options: str) -> None:
        super().__init__(directory, **{"server.keep_memory": "keeper", "server.keep_for": KEEP_FOR, **options})

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)  # type: ignore[arg-type]  # as `with` gives them
        with contextlib.suppress(KeeperFault):
            drop_everything(self.socket)

    @property
    def keeper(self) -> Process | None:
        """The keeper process; None where none is there. REQUIRES: no daemon runs."""
        found = OwnKeeper(self.socket, 600)
        with contextlib.suppress(KeeperFault):
            for descriptor in found.take_memory().values():
                os.close(descriptor)
        pid = found.pid
        found.close()
        return Process(pid) if pid else None

    @property
    def keeper_of_running(self) -> Process:
        """The keeper process by the daemon's word."""
        return Process(int(str(self.info()["dram_kept_by"]).split("process ")[1].rstrip(")")))

    def began(self) -> str:
        """From what DRAM began."""
        return str(self.info()["dram_began"])

    def wait_keeper_ended(self, keeper: Process) -> None:
        """Until a keeper has ended."""
        wait_until(lambda: has_ended(keeper), "the keeper has ended")


class StoredDaemon(Daemon):
    """One kvpoold after another under a service manager with a descriptor store: what it gives it is passed to the next one.

    Invariant: the manager's side has at most as many descriptors as the unit allows.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        super().__init__(directory, **{"server.keep_memory": "auto", **options})
        self.stored: dict[str, int] = {}
        self.lines: list[str] = []
        address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self.environment = {"NOTIFY_SOCKET": address, "FDSTORE": str(FILES_MAX)}

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)  # type: ignore[arg-type]  # as above
        self.forget()
        self._socket.close()

    def launch(self, *arguments: str) -> None:
        """Start as a service manager does, with what it has stored from descriptor 3 on."""
        self.take()
        names = list(self.stored)
        environment = {
            **os.environ,
            **self.environment,
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        # From numbers above all that are given, so that no redirection takes the place of one that is still to be given.
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in self.stored.values()]
        moves = " ".join(f"{FIRST + place}<&{high} {high}<&-" for place, high in enumerate(passed))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", BECOME.format(moves=moves), "manager", *self.command(), *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=passed,
            )
        for descriptor in passed:
            os.close(descriptor)

    def take(self) -> None:
        """Read what was sent since, as a manager that keeps what it is given by name."""
        while select.select([self._socket], [], [], 0)[0]:
            message, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(64))
            received = array.array("i")
            for _, _, data in ancillary:
                received.frombytes(data)
            lines = message.decode().splitlines()
            self.lines += lines
            names = [line.partition("=")[2] for line in lines if line.startswith("FDNAME=")]
            if "FDSTORE=1" in lines:
                self._store(names[0], list(received))
            elif "FDSTOREREMOVE=1" in lines and names[0] in self.stored:
                os.close(self.stored.pop(names[0]))

    def wait_stored(self, name: str) -> None:
        """Until the manager has a file."""

        def has_it() -> bool:
            self.take()
            return name in self.stored

        wait_until(has_it, f"{name} is stored")

    def forget(self) -> None:
        """As a stop of the service: nothing is stored any more."""
        self.take()
        for descriptor in self.stored.values():
            os.close(descriptor)
        self.stored.clear()

    def _store(self, name: str, received: list[int]) -> None:
        """As systemd: a file that it has is not stored twice, and beyond its limit nothing is."""
        (descriptor,) = received
        is_known = any(os.path.sameopenfile(descriptor, other) for other in self.stored.values())
        if is_known or len(self.stored) >= FILES_MAX:
            os.close(descriptor)
            return
        self.stored[name] = descriptor
