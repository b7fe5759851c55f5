"""The image: its steps, what it has, and a daemon and an engine that run as compose.yaml says."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool.units import parse_duration
from kvpool_tools.cli.kvpoolctl import TIMEOUT
from tests.packages.containers import Container, Running, Volume
from tests.packages.images import CONTAINERFILE, Image, context
from tests.packages.roots import TREE
from tests.packages.tools import tool

BYTES_MAX = 250 * 10**6
COMPOSE: dict[str, Any] = yaml.safe_load((TREE / "configs/compose.yaml").read_text())
# Instead of the sizes of a node.
SMALL = ["--set=dram.capacity=16MiB", "--set=ssd.capacity=64MiB"]
ENGINE_UID = 1234


def test_hadolint_finds_nothing() -> None:
    ended = subprocess.run([tool("hadolint"), CONTAINERFILE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_builder_is_given_the_wheels_and_what_they_need_alone() -> None:
    given = {re.sub(r"kvpool-.*\.whl", "kvpool.whl", name) for name in context()}
    assert given == {".dockerignore", "dist/kvpool.whl", "packaging/debian/packages.txt"}


def test_the_image_is_small_and_has_no_compiler_and_no_pip(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    used = image.bytes_used()
    with capsys.disabled():
        print(f"\nimage: {used / 1e6:.0f} MB")
    assert used <= BYTES_MAX
    for absent in ("cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "pip", "pip3"):
        assert image.machine.try_script(f"{image.exports()}command -v {absent}").returncode, absent
    assert image.machine.try_script("/opt/kvpool/bin/python3 -c 'import pip'").returncode
    # What was installed is what is pinned.
    names = (
        "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()), sep='\\n')"
    )
    installed = image.machine.run_script(f'/opt/kvpool/bin/python3 -I -c "{names}"').split()
    pinned = re.findall("^[^ #]+==[^ ]+", (TREE / "packaging/debian/packages.txt").read_text(), re.MULTILINE)
    others = {name.lower().replace("_", "-") for name in installed if not name.startswith("kvpool==")}
    assert others == set(pinned)


def test_nothing_of_the_image_is_the_users(image: Image) -> None:
    """But its two volumes: who breaks into the daemon changes nothing of its programs, also where the root can be written."""
    found = image.machine.run_script(
        "find / -xdev \\( -path /packages -o -path /proc \\) -prune -o -user 990 -print"
    ).split()
    assert set(found) <= set(image.volumes)
    assert image.machine.run_script("stat -c '%U:%G %a' /run/kvpool /var/lib/kvpool").splitlines() == [
        "kvpool:kvpool 750",
        "kvpool:kvpool 700",
    ]
    assert image.machine.run_script("find / -xdev -perm /6000 -newer /opt/kvpool/pyvenv.cfg -print") == ""


def test_a_hung_daemon_is_reported_before_the_health_check_gives_up(image: Image) -> None:
    """The command waits for a welcome and for an answer; half of the time is left for its start."""
    assert parse_duration(image.health_flags["timeout"]) >= 4 * parse_duration(TIMEOUT)


def _daemon(image: Image) -> Container:
    """The daemon of compose.yaml: its folders of the node are folders of the machine."""
    service = COMPOSE["services"]["kvpoold"]
    assert (service["read_only"], service["cap_drop"], service["network_mode"]) == (True, ["ALL"], "none")
    uid, gid = map(int, service["user"].split(":"))
    assert f"{uid}:{gid}" == image.user
    volumes = []
    for volume in service["volumes"]:
        source, target, *flags = volume.split(":")
        folder = image.machine.shared / f"compose{source}"
        if not folder.exists():
            folder.mkdir(parents=True)
            # As docs/operations.md says: `install -d` by an operator.
            folder.chmod({"/run/kvpool": 0o750, "/mnt/nvme0/kvpool": 0o700}.get(source, 0o755))
            if not flags:
                os.chown(folder, uid, gid)
        volumes.append(Volume(f"/packages/compose{source}", target, "ro" in flags))
    shutil.copy(TREE / "configs/kvpool.toml", image.machine.shared / "compose/etc/kvpool/kvpool.toml")
    return Container(image, [*image.entry, *service["command"], *SMALL], uid, gid, volumes=volumes)


def _engine(image: Image) -> Container:
    """The engine of compose.yaml, of a user that the daemon does not know: the socket's folder and the group are all it has."""
    service = COMPOSE["services"]["engine"]
    volumes = [
        Volume(f"/packages/compose{source}", target) for source, target in (v.split(":") for v in service["volumes"])
    ]
    command = ["/opt/kvpool/bin/python3", "-I", "/packages/round_trip.py", "/run/kvpool/kvpool.sock"]
    groups = [int(group) for group in service["group_add"]]
    return Container(image, command, ENGINE_UID, ENGINE_UID, groups, volumes, service["environment"])


def test_compose_starts_a_daemon_and_an_engine(image: Image) -> None:
    image.machine.share_file(TREE / "packaging/round_trip.py")
    daemon, engine = _daemon(image), _engine(image)
    health = replace(daemon, command=image.health)
    assert health.attempt().returncode == 1
    with Running(daemon, "/packages/daemon.log") as running:
        running.until(health)
        engine.run()
        info = replace(daemon, command=["kvpoolctl", "info"]).run()
        assert re.search("^ssd_state:ok$", info, re.MULTILINE), info
        assert replace(daemon, command=["kvpoolctl", "check"]).run()
        # The group is what admits an engine, and no group makes it an operator.
        assert replace(engine, groups=[]).attempt().returncode
        assert replace(engine, command=["kvpoolctl", "info"]).attempt().returncode
        assert (
            replace(daemon, command=["sh", "-c", "touch /opt/kvpool/x || touch /etc/x || touch /tmp/x"])
            .attempt()
            .returncode
        )
        assert running.stop() == 0, running.wrote()
    assert "stopped" in image.machine.run_script("cat /packages/daemon.log")


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_make_image_asks_the_builder_that_works(builder: str, tmp_path: Path) -> None:
    """Stand-ins: no builder is here."""
    calls = tmp_path / "calls"
    for name in ("docker", "podman", "buildah"):
        program = tmp_path / name
        works = f'echo {name} "$@" >>{calls}' if name == builder else "exit 1"
        program.write_text(f"#!/bin/sh\n{works}\n")
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE": "debian@sha256:0"}
    written = subprocess.run(
        ["scripts/make-image"], cwd=TREE, env=environment, check=True, capture_output=True, text=True
    ).stdout
    _, built = calls.read_text().splitlines()
    tag = written.split()[-1]
    assert re.fullmatch(r"localhost/kvpool:[A-Za-z0-9.-]+", tag)
    assert built.startswith(f"{builder} build ")
    for words in (
        "--build-arg BASE=debian@sha256:0 ",
        "--file packaging/Containerfile ",
        f"--tag {tag} ",
        "--tag localhost/kvpool:latest .",
    ):
        assert words in built
    assert ("--format docker" in built) == (builder != "docker")
    assert COMPOSE["services"]["kvpoold"]["image"] == "${KVPOOL_IMAGE:-localhost/kvpool:latest}"


def test_make_image_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("docker", "podman", "buildah"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = subprocess.run(["scripts/make-image"], cwd=TREE, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        "make-image: neither docker nor podman nor buildah works here: install one of them\n",
    )
