"""Bare Debian machines: a root that debootstrap made, entered in namespaces of its own, without a network.

A release's root is made once, into build/packages/roots, and never changed: each machine writes to a layer above it, in memory,
which goes with the machine. What packages need of the distribution is downloaded with the root: apt installs it offline. A
first process sleeps, or is systemd, with control groups below one of the machine's own. Root's rights are needed, and
debootstrap, util-linux, iproute2; where one lacks, the check fails.
"""

import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

TREE = Path(__file__).parents[2]
ROOTS = TREE / "build/packages/roots"
RELEASES = ("bookworm", "trixie")
# What wheels and the Debian package ask of the distribution, downloaded and not installed.
DOWNLOADED = "python3 python3-venv python3-pip systemd dbus procps libibverbs1 libnuma1 libcurl4"
# One command inside; a package's installation takes a minute beside other work.
COMMAND_S = 600
START_S = 120
_count = itertools.count()
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A control group of the machine's own: $1 its name, $2 a folder for their file system, then a command that begins in it.
IN_GROUP = """
mount -t cgroup2 cgroup2 "$2"
group="$2$(sed -n 's/^0:://p' /proc/self/cgroup)/$1"
mkdir "$group"
echo $$ >"$group/cgroup.procs"
shift 2
exec "$@"
"""
# Removes it, and what systemd made below it, when the last process is gone.
LEAVE_GROUP = """
mount -t cgroup2 cgroup2 "$2"
group="$2$(sed -n 's/^0:://p' /proc/self/cgroup)/$1"
until grep -q 'populated 0' "$group/cgroup.events"; do sleep 0.02; done
find "$group" -depth -type d -exec rmdir {} +
"""
# $1 the release's root, $2 a folder for the layers, $3 what the machine shares with its host, then the first process.
LAYERS = """
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work" "$2/root"
root="$2/root"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$root"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir "$root/packages"
mount --bind "$3" "$root/packages"
ip link set lo up
shift 3
exec chroot "$root" env -i container=packages PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  sh -c 'echo ready; exec "$@"' machine "$@"
"""
SLEEP = "exec sleep infinity"
# As a distribution has it, but that nothing beyond basic.target is started.
SYSTEMD = """
apt-get install --no-download --yes --no-install-recommends systemd dbus >/packages/systemd.log 2>&1
exec /lib/systemd/systemd --log-target=null --show-status=0 --unit=basic.target
"""


def run_words(*words: str | Path) -> str:
    """Run a command of the host, which ends with 0: what it wrote."""
    ended = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=COMMAND_S)
    assert ended.returncode == 0, (
        f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    )
    return ended.stdout


def _shell(script: str) -> list[str]:
    """The words that run a script, which may be followed by its arguments."""
    return ["sh", "-euc", script, "machine"]


def release_root(release: str) -> Path:
    """The folder of a release's root; made where it lacks: a minute and 300 MB.

    Raises AssertionError where debootstrap or apt does not end well, with what they wrote.
    """
    root = ROOTS / release
    complete = root / ".complete"
    if not complete.exists():
        assert shutil.which("debootstrap"), "no debootstrap: apt-get install debootstrap"
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        run_words("debootstrap", "--variant=minbase", release, root)
        complete.touch()
    if complete.read_text() != DOWNLOADED:
        run_words("chroot", root, "apt-get", "update")
        run_words(
            "chroot", root, "sh", "-euc", f"apt-get install -y --download-only --no-install-recommends {DOWNLOADED}"
        )
        complete.write_text(DOWNLOADED)
    return root


class Machine:
    """A release's machine, from the moment when it is made to the end of the `with` block; `shared` is /packages inside.

    Its first process sleeps, or is systemd: what runs inside is started by `run_script`, and ends with the machine.
    """

    def __init__(self, release: str, folder: Path, first: str = SLEEP) -> None:
        self.shared = folder / "shared"
        layers = folder / "layers"
        groups = folder / "groups"
        for made in (self.shared, layers, groups):
            made.mkdir(parents=True)
        self._group = [f"kvpool-machine-{os.getpid()}-{next(_count)}", str(groups)]
        # It ends with this process, whatever ends that.
        holder = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", *_shell(IN_GROUP), *self._group]
        namespaces = ["unshare", "--pid", "--fork", "--uts", "--ipc", "--cgroup", "--net", "--kill-child"]
        machine = [*_shell(LAYERS), str(release_root(release)), str(layers), str(self.shared), "sh", "-euc", first]
        self._holder = subprocess.Popen(
            [*holder, *namespaces, *machine], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", f"the machine of {release} did not start"
        self._first = self._child()
        if first == SYSTEMD:
            self._await_systemd()

    def _await_systemd(self) -> None:
        until = time.monotonic() + START_S
        while self.try_script("systemctl is-active basic.target").returncode != 0:
            assert time.monotonic() < until, f"systemd did not start: {(self.shared / 'systemd.log').read_text()}"
            time.sleep(0.1)

    def _child(self) -> int:
        """The machine's first process, as its host numbers it."""
        pid = self._holder.pid
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.01)
        raise AssertionError("the machine has no first process")

    @property
    def root(self) -> Path:
        """Its files, as the host finds them."""
        return Path(f"/proc/{self._first}/root")

    def words(self, script: str, user: str = "root") -> list[str]:
        """The command line, of the host, that runs a shell script inside; for a process that goes on."""
        inside = [
            "nsenter",
            "--target",
            str(self._first),
            "--all",
            "--root",
            "--wd",
            "env",
            "-i",
            f"PATH={PATH}",
            "LC_ALL=C",
        ]
        inside += ["DEBIAN_FRONTEND=noninteractive"]
        if user != "root":
            inside += ["runuser", "-u", user, "--"]
        return [*inside, "sh", "-euc", script]

    def try_script(self, script: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run a shell script inside, and return what it wrote, errors in one with the rest, whatever its exit code."""
        return subprocess.run(
            self.words(script, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )

    def run_script(self, script: str, user: str = "root") -> str:
        """Run a shell script inside, which ends with 0: what it wrote."""
        ended = self.try_script(script, user)
        assert ended.returncode == 0, f"exit code {ended.returncode} of:\n{script}\nwhich wrote:\n{ended.stdout}"
        return ended.stdout

    def share_file(self, file: Path) -> str:
        """Copy a file of the host to /packages, and return its path inside."""
        shutil.copy(file, self.shared / file.name)
        return f"/packages/{file.name}"

    def __enter__(self) -> "Machine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._holder:
            self._holder.kill()
        run_words("unshare", "--mount", *_shell(LEAVE_GROUP), *self._group)
