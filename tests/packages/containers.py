"""A container without its runtime: a process in namespaces of its own, on an image's files, with what a manifest gives it.

Its root is read-only, `volumes` and /dev/shm are not; capabilities are those named, new ones cannot be had. All containers of a
machine have one network, as those of a pod do, and no other.
"""

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tests.packages.images import Image

START_S = 60
STOP_S = 60
# It sees its own processes, shared memory and mounts alone.
SPACES = "unshare --mount --pid --ipc --uts --fork --kill-child --mount-proc"
ALONE = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
{volumes}
for writable in /run /tmp /packages; do mount -o remount,bind,ro "$writable"; done
mount -o remount,bind,ro /
"""


@dataclass(frozen=True)
class Volume:
    """A folder of the machine and where a container sees it."""

    source: str
    target: str
    is_readonly: bool = False


@dataclass(frozen=True)
class Container:
    """What a manifest says of a container."""

    image: Image
    command: Sequence[str]
    uid: int
    gid: int
    groups: Sequence[int] = ()
    volumes: Sequence[Volume] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    capabilities: Sequence[str] = ()

    def script(self) -> str:
        """A shell script for the image's machine."""
        mounts = "".join(
            f"mkdir -p {volume.target}; mount --bind {volume.source} {volume.target}\n"
            + (f"mount -o remount,bind,ro {volume.target}\n" if volume.is_readonly else "")
            for volume in self.volumes
        )
        kept = "".join(f",+{name.lower()}" for name in self.capabilities)
        groups = f"--groups {','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        given = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items())
        become = f"setpriv --reuid {self.uid} --regid {self.gid} {groups}"
        become += f" --bounding-set=-all{kept} --inh-caps=-all --no-new-privs"
        inside = f"{ALONE.format(volumes=mounts)}{self.image.exports()}{given}exec {become} {shlex.join(self.command)}"
        return f"exec {SPACES} sh -euc {shlex.quote(inside)}"

    def run(self) -> str:
        """Run it to its end, which is good: what it wrote."""
        return self.image.machine.run_script(self.script())

    def attempt(self) -> subprocess.CompletedProcess[str]:
        """Run it to its end, whatever that is."""
        return self.image.machine.try_script(self.script())


class Running:
    """A container that runs for as long as the `with` block, and is stopped as a runtime does: SIGTERM to its first process."""

    def __init__(self, container: Container, log: str) -> None:
        self._machine = container.image.machine
        self._log = log
        # Of `unshare`, which hands no signal on: its child is the first process.
        script = f"({container.script()}) >{log} 2>&1 & echo $!; wait $!"
        self._process = subprocess.Popen(
            self._machine.words(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._spaces = int(self._process.stdout.readline())

    def wrote(self) -> str:
        """Its log so far."""
        return self._machine.run_script(f"cat {self._log}")

    def until(self, container: Container) -> str:
        """What a second container writes at its first good end: a probe of this one."""
        deadline = time.monotonic() + START_S
        while (ended := container.attempt()).returncode:
            assert self._process.poll() is None, f"it ended with {self._process.returncode}:\n{self.wrote()}"
            assert time.monotonic() < deadline, f"{ended.stdout}\n{self.wrote()}"
            time.sleep(0.2)
        return ended.stdout

    def stop(self) -> int:
        """The exit code after SIGTERM."""
        self._machine.run_script(f"kill -TERM $(cat /proc/{self._spaces}/task/{self._spaces}/children)")
        return self._process.wait(STOP_S)

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process:
            if self._process.poll() is None:
                self._machine.run_script(f"kill -KILL {self._spaces}")
