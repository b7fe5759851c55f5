"""The wheels of dist/: what is in them, and bare machines that they are installed on without a network.

A wheel for another processor is run by an emulator of its instructions: the module is imported, and makes the same keys.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest

import kvpool
from tests.packages.roots import ROOTS, SYSTEMD, TREE, Machine

DOWNLOADED = TREE / "build/packages/downloaded"
TAGS = ("cp310-cp310", "cp311-cp311", "cp312-abi3")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
EVERY = [f"{tag}-{platform}" for tag in TAGS for platform in PLATFORMS]
# The machines that wheels run on here: a release, its Python, the tag of the wheel.
RUN = [("bookworm", "3.11", "cp311-cp311"), ("trixie", "3.13", "cp312-abi3")]
# From a bare root to the first chunk stored, without the network's time, on a machine that does nothing else: printed.
START_TO_CHUNK_S = 60
Find = Callable[[str], Path]

# What the page has an operator do: collect what a wheel needs; make an environment on a node; install there, offline.
PAGE = (TREE / "docs/operations.md").read_text()
COLLECT, MAKE, INSTALL = re.search(r"```\n(pip download .*)\n(.*?) *#.*\n(.*)\n```", PAGE).groups()  # type: ignore[union-attr]
# Stores chunks through its daemon.
SERVE = """
cd /tmp
/opt/kvpool/bin/kvpoold --set server.socket=/tmp/kvpool.sock --set dram.capacity=16MiB \\
  --set ssd.path=/tmp/ssd --set ssd.create=true --set ssd.capacity=64MiB >/tmp/log 2>&1 &
daemon=$!
until /opt/kvpool/bin/kvpoolctl --socket /tmp/kvpool.sock info >/tmp/info 2>/dev/null; do
  kill -0 $daemon || { cat /tmp/log; exit 1; }
  sleep 0.1
done
/opt/kvpool/bin/python -I /packages/round_trip.py /tmp/kvpool.sock
"""
CHECK = """
/opt/kvpool/bin/kvpoolctl --socket /tmp/kvpool.sock check
/opt/kvpool/bin/kvpoolctl --socket /tmp/kvpool.sock stats ssd | grep -qx ssd.state:ok
/opt/kvpool/bin/kvpoolctl --socket /tmp/kvpool.sock info
"""

# Keys of a prompt and a checksum, then the paths that were chosen for the processor.
KEYS = """
import kvpool_client, kvpool_native, numpy
tokens = numpy.arange(4096, dtype=numpy.int32)
print(kvpool_native.hash_chunks(tokens, 32, (bytes(32),))[1][0][-32:].hex(), kvpool_native.crc32c(bytes(range(256)) * 17))
print(kvpool_native.hash_lanes(), kvpool_native.crc_path())
"""


def _wheel(built: Find, tags: str) -> Path:
    return built(f"kvpool-*-{tags}.whl")


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def _download(wheel: Path, release: str, python: str) -> Path:
    """A folder with the wheels of everything that the wheel and its extra need."""
    folder = DOWNLOADED / release
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("kvpool-*"):
        earlier.unlink()
    (words,) = re.findall(r"`pip download` takes `(.*)` too", PAGE)
    words = words.replace("3.11", python)
    command = _of(COLLECT, wheel).replace("--dest wheels", f"--dest {folder} {words}")
    ended = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=wheel.parent, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def _of(line: str, wheel: Path) -> str:
    """A line of the page, for this wheel."""
    assert "kvpool-….whl" in line
    return line.replace("kvpool-….whl", wheel.name)


def _start(wheel: Path, extra: str = "[daemon]") -> str:
    """What makes a bare machine one that the wheel is installed on."""
    python = "apt-get install --no-download --yes --no-install-recommends python3 python3-venv >/dev/null 2>&1"
    return f"{python}\ncd /packages\n{MAKE}\n{_of(INSTALL, wheel).replace('[daemon]', extra)}\n"


@pytest.fixture
def installed(built: Find, machine: Callable[[str], Machine]) -> Callable[[str, str, str], Machine]:
    """A bare machine of a release on which the wheel's daemon has stored chunks; prints how long that took."""

    def start(release: str, python: str, tags: str) -> Machine:
        wheel = _wheel(built, f"{tags}-manylinux_2_28_x86_64")
        downloaded = _download(wheel, release, python)
        bare = machine(release)
        bare.share_file(TREE / "packaging/round_trip.py")
        shutil.copytree(downloaded, bare.shared / "wheels")
        started = time.monotonic()
        bare.run_script(_start(wheel) + SERVE)
        seconds = time.monotonic() - started
        print(f"{wheel.name} on {release}: {seconds:.1f} s to the first chunk stored; the bar is {START_TO_CHUNK_S} s")
        return bare

    return start


@pytest.mark.parametrize(("release", "python", "tags"), RUN)
def test_it_stores_and_loads_on_a_bare_machine(
    installed: Callable[[str, str, str], Machine], release: str, python: str, tags: str
) -> None:
    bare = installed(release, python, tags)
    info = dict(line.split(":", 1) for line in bare.run_script(CHECK).splitlines() if ":" in line)
    assert info["version"] == kvpool.__version__
    assert info["openssl"].startswith("OpenSSL 3.")
    assert info["ssd_io"].startswith("io_uring")
    assert info["checksum"] != "crc32c (table)"
    for command in ("kvpoold", "kvpoolctl"):
        shown = bare.run_script(f"/opt/kvpool/bin/{command} --version")
        assert shown == f"{command} {kvpool.__version__} ({info['openssl']})\n"
    assert bare.try_script("command -v cc || command -v c++ || command -v gcc").returncode != 0
    reference = bare.run_script("/opt/kvpool/bin/kvpoold --print-config")
    assert reference == (TREE / "configs/kvpool.toml").read_text()
    bare.run_script(
        "cd /tmp; /opt/kvpool/bin/kvpoold --print-config >reference; /opt/kvpool/bin/kvpoold --check --config reference"
    )


def test_its_service_is_refused_where_its_user_cannot_read_it(built: Find, machine: Callable[..., Machine]) -> None:
    """An operator whose files are nobody else's; `make install-service` without make."""
    wheel = _wheel(built, "cp311-cp311-manylinux_2_28_x86_64")
    booted = machine("bookworm", SYSTEMD)
    shutil.copytree(_download(wheel, "bookworm", "3.11"), booted.shared / "wheels")
    for folder in ("scripts", "configs", "docs"):
        shutil.copytree(TREE / folder, booted.shared / "tree" / folder)
    booted.run_script(f"umask 077\n{_start(wheel)}")
    install = "umask 077; cd /root; /packages/tree/scripts/install-service --kvpoold /opt/kvpool/bin/kvpoold"
    refused = booted.try_script(install)
    assert refused.returncode == 1
    remedy = "chmod -R a+rX /opt/kvpool"
    line = "install-service: the user kvpool cannot run /opt/kvpool/bin/kvpoold: let everybody read it, as by "
    assert refused.stdout.endswith(f"{line}{remedy}\n"), refused.stdout
    booted.run_script(f"{remedy}; {install}; systemctl start kvpoold; /opt/kvpool/bin/kvpoolctl check")


def test_without_its_extra_the_commands_name_it(built: Find, machine: Callable[[str], Machine]) -> None:
    wheel = _wheel(built, "cp311-cp311-manylinux_2_28_x86_64")
    downloaded = _download(wheel, "bookworm", "3.11")
    bare = machine("bookworm")
    shutil.copytree(downloaded, bare.shared / "wheels")
    bare.run_script(_start(wheel, extra=""))
    bare.run_script("/opt/kvpool/bin/python -I -c 'import kvpool_client'")
    for command in ("kvpoold", "kvpoolctl info", "kvpoold --version"):
        ended = bare.try_script(f"/opt/kvpool/bin/{command}")
        assert (ended.returncode, len(ended.stdout.splitlines())) == (2, 1)
        assert "extra daemon" in ended.stdout
    # An engine's environment has some of the extra's packages.
    bare.run_script("/opt/kvpool/bin/pip install --quiet --no-index --find-links /packages/wheels click")
    ended = bare.try_script("/opt/kvpool/bin/kvpoold")
    assert (ended.returncode, len(ended.stdout.splitlines())) == (2, 1), ended.stdout
    assert "extra daemon" in ended.stdout


@pytest.mark.parametrize("tags", EVERY)
def test_everything_is_in_it_and_nothing_of_the_builder(built: Find, tags: str) -> None:
    wheel = _wheel(built, tags)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    module = [name for name in files if re.fullmatch(r"kvpool_native\..*so", name)]
    processor = tags.rpartition("_2_28_")[2]
    number = tags[2:5]
    assert module == [
        "kvpool_native.abi3.so" if "abi3" in tags else f"kvpool_native.cpython-{number}-{processor}-linux-gnu.so"
    ]
    for place, file in {
        "kvpool/share/kvpool.toml": "configs/kvpool.toml",
        "kvpool/share/kvpool-alerts.yml": "configs/kvpool-alerts.yml",
        "kvpool/share/grafana-dashboard.json": "configs/grafana-dashboard.json",
        "kvpool_native-stubs/__init__.pyi": "typings/kvpool_native.pyi",
    }.items():
        assert files[place] == (TREE / file).read_bytes()
    assert not [name for name in files if name.endswith(("direct_url.json", ".pyc"))]
    assert not [name for name in files if str(TREE).encode() in files[name]]
    tops = {name.split("/")[0].split(".")[0] for name in files if ".dist-info/" not in name}
    assert tops == {
        *("kvpool", "kvpool_blocks", "kvpool_client", "kvpool_native", "kvpool_native-stubs", "kvpool_sparse"),
        "kvpool_tools",
    }
    entries = next(files[name].decode() for name in files if name.endswith("entry_points.txt"))
    for group in ("console_scripts", "pipx.run", "vllm.general_plugins"):
        assert f"[{group}]" in entries


@pytest.mark.parametrize("tags", EVERY)
def test_its_metadata_is_complete(built: Find, tags: str) -> None:
    wheel = _wheel(built, tags)
    printed = _metadata(wheel)
    assert printed["Version"] == kvpool.__version__
    assert printed["License-Expression"] == "Apache-2.0"
    assert printed.get_all("License-File") == ["LICENSE"]
    assert printed["Requires-Python"] == ">=3.10"
    assert len(printed.get_all("Classifier", [])) > 5
    assert set(printed.get_all("Provides-Extra", [])).isdisjoint({"test", "lint"})
    tools = TREE / "build/packages/tools/bin"
    subprocess.run([tools / "twine", "check", "--strict", wheel], check=True, capture_output=True, timeout=60)
    if "abi3" in tags:
        judged = [str(tools / "abi3audit"), "--strict", "--summary", str(wheel)]
        subprocess.run(judged, check=True, capture_output=True, timeout=600)
    shown = subprocess.run(
        [tools / "auditwheel", "show", wheel], check=True, capture_output=True, text=True, timeout=60
    )
    bound = re.search(r'platform tag:?\s+"manylinux_2_(\d+)_', shown.stdout)
    assert bound
    assert int(bound[1]) <= 28


@pytest.fixture(scope="module")
def foreign_root() -> Path:
    """The files of a Debian for 64-bit ARM, with its Python; nothing of it has run."""
    root = ROOTS / "bookworm-arm64"
    if not (root / ".complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        words = [
            "debootstrap",
            "--arch=arm64",
            "--foreign",
            "--variant=minbase",
            "--include=python3",
            "bookworm",
            str(root),
        ]
        subprocess.run(words, check=True, capture_output=True, timeout=600)
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True, timeout=60)
        (root / ".complete").touch()
    return root


def test_the_module_of_another_processor_makes_the_same_keys(built: Find, foreign_root: Path, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static")
    assert emulator, "no qemu-aarch64-static: apt-get install qemu-user-static"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "--only-binary=:all:"]
    pip += ["--python-version=3.11", "--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64"]
    wheel = _wheel(built, "cp311-cp311-manylinux_2_28_aarch64")
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=600)
    there = [
        emulator,
        "-L",
        str(foreign_root),
        "-E",
        f"PYTHONPATH={tmp_path}",
        str(foreign_root / "usr/bin/python3.11"),
    ]
    printed = [
        subprocess.run(
            [*python, "-c", KEYS], check=True, capture_output=True, text=True, timeout=300
        ).stdout.splitlines()
        for python in (there, [sys.executable])
    ]
    assert printed[0] == [printed[1][0], "neon pmull"]
