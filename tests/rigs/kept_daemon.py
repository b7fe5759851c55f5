"""A daemon whose memory is kept, by a process of its own or by a service manager's descriptor store, until the test ends."""

import contextlib
import fcntl
import os
import subprocess
from pathlib import Path

from kvpool.index.holders import Process, has_ended
from kvpool.server.keeping.keeper_process import FILES_MAX
from kvpool.server.keeping.own_keeper import OwnKeeper, drop_everything
from kvpool.tiers.dram.kept.keeper import KeeperFault
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.storing_manager import StoringManager

KEEP_FOR = "10m"
FIRST = 3  # the first descriptor that a service manager passes
ABOVE = 100
# Starts a command, hands SIGTERM on to it, and ends with it.
HAND_ON = 'trap "kill -TERM \\$started" TERM; "$@" & started=$!; wait $started; wait $started'
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


class ContainedDaemon(KeptDaemon):
    """One kvpoold after another, each in a namespace of processes of its own, whose first one hands signals on. Root alone."""

    def command(self) -> list[str]:
        """The command line."""
        namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*namespace, "bash", "-c", HAND_ON, "first", *super().command()]

    def signal_first_process(self, number: int) -> None:
        """A signal to the first process there, as a container's stop."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), number)


class StoredDaemon(Daemon):
    """One kvpoold after another under a service manager with a descriptor store: what it gives it is passed to the next one."""

    def __init__(self, directory: Path, room: int = FILES_MAX, **options: str) -> None:
        """`room`: how much the manager really stores, whatever it says."""
        super().__init__(directory, **{"server.keep_memory": "auto", **options})
        self.manager = StoringManager(str(directory / "notify"), room)
        self.environment = {"NOTIFY_SOCKET": self.manager.address, "FDSTORE": str(FILES_MAX)}

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)  # type: ignore[arg-type]  # as above
        self.manager.__exit__()

    def __enter__(self) -> "StoredDaemon":
        super().__enter__()
        return self

    def launch(self, *arguments: str) -> None:
        """Start as a service manager does, with what it has stored from descriptor 3 on."""
        self.manager.take()
        stored = self.manager.stored
        environment = {
            **os.environ,
            **self.environment,
            "LISTEN_FDS": str(len(stored)),
            "LISTEN_FDNAMES": ":".join(stored),
        }
        # From numbers above all that are given, so that no redirection takes the place of one that is still to be given.
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in stored.values()]
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

    def wait_stored(self, name: str) -> None:
        """Until the manager has a file."""
        wait_until(lambda: name in self.manager.stored, f"{name} is stored")
