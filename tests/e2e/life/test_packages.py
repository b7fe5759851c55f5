"""The Debian package's files and fields. `make test-packages` builds the whole, installs it aside and runs its daemon."""

import shutil
import subprocess
from pathlib import Path

import pytest

import kvpool

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    shutil.which("dpkg-deb") is None, reason="dpkg-deb (Debian package dpkg) is not installed"
)


def _stage(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "scripts" / "stage-deb"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without the Python packages, staged twice, as a build does."""
    root = tmp_path_factory.mktemp("package") / "root"
    for _ in range(2):
        done = _stage(str(root), kvpool.__version__, "3.11", "2.35")
        assert (done.returncode, done.stderr) == (0, "")
    return root


@pytest.mark.slow
def test_the_package_declares_its_dependencies(staged: Path) -> None:
    control = dict(
        line.split(": ", 1) for line in (staged / "DEBIAN/control").read_text().splitlines() if line[0] != " "
    )
    assert (control["Package"], control["Version"]) == ("kvpool", kvpool.__version__)
    assert control["Depends"] == "python3.11, libc6 (>= 2.35), libstdc++6 (>= 12), libssl3 | libssl3t64"
    assert int(control["Installed-Size"]) > 100
    assert "@" not in (staged / "DEBIAN/control").read_text().replace("kvpool@localhost", "")


def test_the_package_has_daemon_service_and_configuration(staged: Path, tmp_path: Path) -> None:
    package = tmp_path / "kvpool.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", str(staged), str(package)], check=True, timeout=60)
    listed = subprocess.run(["dpkg-deb", "-c", str(package)], capture_output=True, text=True, check=True, timeout=60)
    files = {line.split()[5].lstrip("."): line for line in listed.stdout.splitlines()}
    expected = {
        "/etc/kvpool/kvpool.toml": "-rw-r--r--",
        "/opt/kvpool/bin/kvpoold": "-rwxr-xr-x",
        "/opt/kvpool/bin/kvpoolctl": "-rwxr-xr-x",
        "/opt/kvpool/pyvenv.cfg": "-rw-r--r--",
        "/usr/bin/kvpoold": "lrwxrwxrwx",
        "/usr/bin/kvpoolctl": "lrwxrwxrwx",
        "/usr/lib/kvpool/write-ssd-dropin": "-rwxr-xr-x",
        "/usr/lib/systemd/system/kvpoold.service": "-rw-r--r--",
        "/usr/lib/systemd/system/kvpoold@.service": "-rw-r--r--",
        "/usr/lib/sysusers.d/kvpool.conf": "-rw-r--r--",
        "/usr/lib/tmpfiles.d/kvpool.conf": "-rw-r--r--",
        "/usr/share/doc/kvpool/operations.md": "-rw-r--r--",
    }
    assert {place: files[place].split()[0] for place in expected} == expected
    assert all("root/root" in line for line in files.values())
    assert (staged / "DEBIAN/conffiles").read_text() == "/etc/kvpool/kvpool.toml\n"
    unit = (staged / "usr/lib/systemd/system/kvpoold.service").read_text()
    assert "ExecStart=/opt/kvpool/bin/kvpoold --config /etc/kvpool/kvpool%i.toml" in unit
    for name, module in (("kvpoold", "kvpool.cli.kvpoold"), ("kvpoolctl", "kvpool_tools.cli.kvpoolctl")):
        entry = (staged / "opt/kvpool/bin" / name).read_text()
        assert entry.startswith("#!/opt/kvpool/bin/python3 -I\n")
        assert f"\nfrom {module} import main\n" in entry


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_its_scripts_start_nothing(staged: Path, script: str) -> None:
    path = staged / "DEBIAN" / script
    subprocess.run(["sh", "-n", str(path)], check=True, timeout=60)
    called = [
        line
        for line in path.read_text().splitlines()
        if "systemctl" in line and not line.strip().startswith(("#", "echo"))
    ]
    assert not [line for line in called if " start " in line or " restart " in line or " enable " in line]
    ignored = subprocess.run(["sh", str(path), "abort-upgrade"], capture_output=True, text=True, check=True, timeout=60)
    assert (ignored.stdout, ignored.stderr) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("v1", "3.11", "2.35"), "version v1 begins with no digit"),
        (("1.0", "python3", "2.35"), "python python3 is no version"),
        (("1.0", "3.11", "musl"), "glibc musl is no version"),
    ],
)
def test_an_invalid_version_is_refused(tmp_path: Path, arguments: tuple[str, ...], fault: str) -> None:
    refused = _stage(str(tmp_path / "root"), *arguments)
    assert (refused.returncode, fault in refused.stderr) == (1, True)
    assert not (tmp_path / "root").exists()
