"""The Debian package on a machine: installed as an operator does, without a network; its daemon, asked and tried."""

from collections.abc import Callable
from pathlib import Path

from tests.packages.roots import TREE, Machine, run_words

# Quiet, for what it writes is shown where a check fails.
INSTALL = "apt-get install -qq --yes --no-install-recommends"
PYTHON = "/usr/lib/kvpool/bin/python3"
SOCKET = "/run/kvpool/kvpool.sock"
ROUND_TRIP = TREE / "packaging/round_trip.py"
# Waits for the daemon at the socket.
AWAIT = "for _ in $(seq 240); do kvpoolctl --socket {socket} info >/dev/null 2>&1 && break; sleep 0.05; done"


def install_package(machine: Machine, package: Path) -> str:
    """What apt wrote. Its input is closed: nobody can answer a question."""
    return machine.run_script(f"exec <&-; {INSTALL} {machine.share_file(package)} 2>&1")


def try_round_trip(machine: Machine, socket: str = SOCKET) -> None:
    """A save and a load through a daemon, by the package's client."""
    machine.run_script(
        f"""{AWAIT.format(socket=socket)}
        {PYTHON} -I {machine.share_file(ROUND_TRIP)} {socket}
        kvpoolctl --socket {socket} check"""
    )


def try_daemon(machine: Machine, options: str) -> None:
    """A save and a load through a daemon that the package's user starts, and that ends well."""
    machine.share_file(ROUND_TRIP)
    machine.run_script(
        f"""setpriv --reuid kvpool --regid kvpool --init-groups kvpoold --config /etc/kvpool/kvpool.toml {options} & daemon=$!
        trap 'kill "$daemon" 2>/dev/null || true' EXIT
        {AWAIT.format(socket=SOCKET)}
        {PYTHON} -I /packages/{ROUND_TRIP.name} {SOCKET}
        kvpoolctl check; kvpoolctl models
        kill "$daemon"
        wait "$daemon" """
    )


def info(machine: Machine, socket: str = SOCKET) -> dict[str, str]:
    """The lines of `kvpoolctl info`."""
    lines = machine.run_script(f"kvpoolctl --socket {socket} info").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def repack(package: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """The package with a change of its files, in a folder."""
    root, changed = folder / "root", folder / "changed.deb"
    folder.mkdir()
    run_words("dpkg-deb", "--raw-extract", package, root)
    change(root)
    run_words("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", root, changed)
    return changed
