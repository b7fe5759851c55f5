"""The Debian package: what is in it, and that it installs, serves and goes on a bare machine without a network."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from kvpool.cli.kvpoold import command as kvpoold
from kvpool_tools.cli.kvpoolctl import cli as kvpoolctl
from tests.packages.debian import AWAIT, INSTALL, PYTHON, SOCKET, install_package, try_daemon
from tests.packages.roots import TREE, Machine, run_words

INSTALLED_MAX_MB = 80
DOCS = "usr/share/doc/kvpool"
COMMANDS = ("kvpoold", "kvpoolctl")
SECTIONS = [
    *("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "ENVIRONMENT", "FILES"),
    *("EXIT STATUS", "EXAMPLES", "SEE ALSO"),
]
# A page's link, without what follows #; and one of an image.
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"


@pytest.fixture(scope="module")
def package(built: Callable[[str], Path]) -> Path:
    """The package in dist/."""
    return built("kvpool_*.deb")


@pytest.fixture(scope="module")
def unpacked(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files."""
    root = tmp_path_factory.mktemp("package") / "root"
    run_words("dpkg-deb", "--extract", package, root)
    return root


def _field(package: Path, name: str) -> str:
    return run_words("dpkg-deb", "--field", package, name).strip()


def test_it_takes_libraries_and_python_from_the_distribution_it_was_built_for(package: Path, unpacked: Path) -> None:
    major, minor = run_words("/usr/bin/python3", "-I", "-c", "import sys; print(*sys.version_info[:2])").split()
    needs = _field(package, "Depends").split(", ")
    assert {f"python3 (>= {major}.{minor})", f"python3 (<< {major}.{int(minor) + 1})"} < set(needs)
    assert [need for need in needs if need.startswith("libssl3")], "no OpenSSL of the distribution"
    assert not [*unpacked.rglob("libssl*"), *unpacked.rglob("libcrypto*")]
    assert Path(f"/usr/bin/python{major}.{minor}") == Path("/usr/bin") / (unpacked / PYTHON[1:]).readlink().name
    assert _field(package, "Recommends") == ""


def test_another_python_than_the_distributions_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.99\n")
    python.chmod(0o755)
    refused = subprocess.run([TREE / "scripts/make-deb", python], cwd=TREE, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, "is Python 3.99, and the package runs on the distribution's" in refused.stderr) == (
        1,
        True,
    )


def test_everybody_may_read_it_and_nobody_else_owns_it(package: Path) -> None:
    """`make test-packages` builds it with the umask 077."""
    listed = run_words("dpkg-deb", "--contents", package).splitlines()
    assert [line for line in listed if not line.startswith("l") and line[7] != "r"] == []
    assert [line for line in listed if line[0] == "d" and line[9] != "x"] == []
    assert [line for line in listed if line.split()[1] != "root/root"] == []


def test_it_asks_nothing_and_keeps_no_path_of_its_builder(package: Path, unpacked: Path) -> None:
    assert run_words("dpkg-query", "--showformat=${Conffiles}", "-W", "dpkg").strip()  # the format knows the field
    assert "conffiles" not in run_words("dpkg-deb", "--info", package)
    assert not (unpacked / "etc").exists()
    assert not [*unpacked.rglob("direct_url.json"), *unpacked.rglob("RECORD"), *unpacked.rglob("*.pyc")]
    found = subprocess.run(["grep", "-rlF", str(TREE), str(unpacked)], capture_output=True, text=True, timeout=60)
    assert found.stdout == ""


def test_its_versions_are_the_pinned_ones(unpacked: Path) -> None:
    pinned = re.findall(r"(?m)^(\S+==\S+) \\$", (TREE / "packaging/debian/packages.txt").read_text())
    (site,) = unpacked.glob("usr/lib/kvpool/lib/python3*/site-packages")
    listed = run_words(sys.executable, "-m", "pip", "list", "--path", site, "--format=freeze").split()
    assert {name.lower().replace("_", "-") for name in listed if not name.startswith("kvpool==")} == set(pinned)
    assert {name.split("==")[0] for name in pinned} >= {"numpy", "uvloop", "urllib3"}


def test_a_later_build_has_the_higher_version(package: Path, unpacked: Path) -> None:
    (own,) = unpacked.glob("usr/lib/kvpool/lib/python3*/site-packages/kvpool-*.dist-info")
    version = own.name.removeprefix("kvpool-").removesuffix(".dist-info")
    assert _field(package, "Version") == version.replace(".dev", "~git").replace("+", ".") + "-1"
    builds = ["0.1.0~git99.gffffffff-1", "0.1.0~git930.g1a2b3c4d-1", "0.1.0-1", "0.1.1~git1.g1a2b3c4d-1"]
    for earlier, later in itertools.pairwise(builds):
        run_words("dpkg", "--compare-versions", earlier, "lt", later)


def test_its_pages_lead_somewhere(unpacked: Path) -> None:
    pages = sorted((unpacked / DOCS).rglob("*.md"))
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text()) if "://" not in link]
    assert len(links) > 90
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
    assert (unpacked / DOCS / "configs/kvpool.toml").read_bytes() == (TREE / "configs/kvpool.toml").read_bytes()
    assert (unpacked / DOCS / "examples/tiny_engine.py").exists()
    unit = (unpacked / "lib/systemd/system/kvpoold.service").read_text()
    assert f"Documentation=file:/{DOCS}/docs/operations.md" in unit


def test_lintian_finds_nothing(package: Path) -> None:
    assert shutil.which("lintian"), "no lintian: apt-get install lintian"
    assert run_words("lintian", "--allow-root", "--fail-on", "error,warning", package) == ""


def test_a_manual_page_has_every_command_and_option_whole(unpacked: Path) -> None:
    shown = {
        name: subprocess.run(
            ["man", "--warnings", "-l", unpacked / f"usr/share/man/man8/{name}.8.gz"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "MANWIDTH": "500", "LC_ALL": "C.UTF-8"},
        )
        for name in COMMANDS
    }
    for name, page in shown.items():
        assert (page.returncode, page.stderr) == (0, "")
        sections = [line for line in page.stdout.splitlines() if re.fullmatch("[A-Z ]+", line) and line[0] != " "]
        assert sections == [section for section in SECTIONS if name == "kvpoolctl" or section != "COMMANDS"]
    context = click.Context(kvpoolctl, info_name="kvpoolctl")
    for command in kvpoolctl.list_commands(context):
        found = kvpoolctl.get_command(context, command)
        assert found is not None
        assert f"\n   kvpoolctl {command}\n" in shown["kvpoolctl"].stdout
        for option in found.params:
            assert all(word in shown["kvpoolctl"].stdout for word in option.opts if word.startswith("-"))
    for option in kvpoold.params:
        assert all(f"\n       {word}" in shown["kvpoold"].stdout for word in option.opts)


def test_a_bare_machine_stores_a_chunk_and_is_bare_again(
    machine: Callable[..., Machine], package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = machine()
    started = time.monotonic()
    output = install_package(bare, package)
    try_daemon(bare, "--set dram.capacity=64MiB")
    stored_s = time.monotonic() - started
    written = bare.run_script("cat /etc/kvpool/kvpool.toml").splitlines()
    assert [line for line in written if not line.startswith("#")] == []
    reference = re.search(r"/usr/share/doc/\S+\.toml", written[0])
    assert reference is not None
    bare.run_script(f"test -s {reference[0]}; : >/etc/kvpool/kvpool.toml")
    bare.run_script("kvpoold --check --config /etc/kvpool/kvpool.toml", user="kvpool")
    shown = bare.run_script(
        "stat -c '%n %U:%G %a' /var/lib/kvpool /run/kvpool; stat -c %a /etc/kvpool/kvpool.toml; getent passwd kvpool"
    )
    assert shown.splitlines()[:3] == ["/var/lib/kvpool kvpool:kvpool 700", "/run/kvpool kvpool:kvpool 750", "644"]
    assert shown.strip().endswith(":/var/lib/kvpool:/usr/sbin/nologin")
    assert "warning" not in output.lower()
    assert bare.try_script("command -v systemd-sysusers systemd-tmpfiles kill").returncode != 0
    packed_mb = float(bare.run_script("dpkg-query -W -f '${Installed-Size}' kvpool")) * 1024 / 1e6
    sizes = bare.run_script("du -sk /usr/lib/kvpool /usr/share/doc/kvpool").splitlines()
    whole_mb = sum(int(line.split()[0]) for line in sizes) * 1024 / 1e6
    with capsys.disabled():
        print(
            f"\n{packed_mb:.0f} MB installed, {whole_mb:.0f} MB with byte code, first chunk stored after {stored_s:.1f} s"
        )
    assert whole_mb <= INSTALLED_MAX_MB

    bare.run_script("apt-get remove --yes kvpool")
    assert bare.run_script("find /usr /lib/systemd -name 'kvpool*' ! -path '/usr/share/doc/*'") == ""
    assert bare.try_script("test -e /etc/kvpool/kvpool.toml").returncode == 0
    assert bare.run_script("dpkg --purge kvpool").splitlines()[-2:] == [
        "kept /var/lib/kvpool",
        "kept the user kvpool; userdel kvpool removes it",
    ]
    assert bare.try_script("test -e /etc/kvpool").returncode == 1
    bare.run_script("userdel kvpool; rm -r /var/lib/kvpool")
    bare.run_script(f"{INSTALL} /packages/{package.name}; userdel kvpool; rm -r /var/lib/kvpool")
    assert "kept" not in bare.run_script("dpkg --purge kvpool")


def test_a_daemon_started_by_hand_is_named_when_the_package_goes(
    machine: Callable[..., Machine], package: Path
) -> None:
    bare = machine()
    install_package(bare, package)
    output = bare.run_script(
        f"""setpriv --reuid kvpool --regid kvpool --init-groups kvpoold --set dram.capacity=64MiB 2>/packages/log & daemon=$!
        {AWAIT.format(socket=SOCKET)}
        echo "pid $daemon"; dpkg --remove kvpool; kill -0 "$daemon"; kill "$daemon"; wait "$daemon" || true"""
    )
    (pid,) = re.findall(r"(?m)^pid (\d+)$", output)
    assert f"process {pid} was started by hand and still runs kvpool, whose files are gone: kill {pid}\n" in output
    bare.run_script("dpkg --install /packages/kvpool_*.deb")
    assert "started by hand" not in bare.run_script("dpkg --remove kvpool")


def test_it_goes_where_systemd_does_not_answer(machine: Callable[..., Machine], package: Path) -> None:
    silent = machine()
    silent.run_script(f"{INSTALL} systemd; mkdir -p /run/systemd/system")
    install_package(silent, package)
    silent.run_script("systemctl --root=/ enable kvpoold kvpoold@2")
    install_package(silent, package)
    silent.run_script("apt-get purge --yes kvpool")
    assert silent.try_script("dpkg-query -W kvpool").returncode == 1
    assert silent.try_script("find /etc/systemd/system -name 'kvpoold*' | grep .").returncode == 1


def test_what_is_not_in_it_can_be_added_beside_it(machine: Callable[..., Machine], package: Path) -> None:
    """Members from etcd need nothing; a shared store and RDMA need Mooncake, as docs/operations.md says."""
    wheels = TREE / "build/packages/wheels"
    if not list(wheels.glob("mooncake*.whl")):
        run_words(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", wheels, MOONCAKE)
    (wheel,) = wheels.glob("mooncake*.whl")
    bare = machine()
    install_package(bare, package)
    check = "runuser -u kvpool -- kvpoold --check --set store.master=127.0.0.1:1 --set store.host=127.0.0.1"
    assert "mooncake-transfer-engine is not installed" in bare.try_script(check).stdout
    etcd = "--set peer.listen=tcp://127.0.0.1:9470 --set peer.name=one --set peer.members=etcd:http://127.0.0.1:2379/kvpool"
    assert "urllib3" not in bare.try_script(f"runuser -u kvpool -- kvpoold --check {etcd}").stdout
    way = r"(?m)^(apt-get install python3-pip.*)\n(pip install --target /usr/local/lib/kvpool) "
    words = re.search(way, (TREE / "docs/operations.md").read_text())
    assert words is not None
    bare.run_script(words[1].replace("apt-get install", INSTALL))
    bare.run_script(f"{words[2]} --no-index --no-deps {bare.share_file(wheel)}")
    bare.run_script(f"cd /; {PYTHON} -I -c 'import mooncake.store, mooncake.engine'")
    assert "is not installed" not in bare.try_script(check).stdout


def test_what_is_not_mounted_leaves_no_half_of_a_package(machine: Callable[..., Machine], package: Path) -> None:
    """A disk and a configuration that are links, whose targets are away while the package is installed over itself."""
    bare = machine()
    install_package(bare, package)
    bare.run_script(
        "rm -r /var/lib/kvpool /etc/kvpool/kvpool.toml; ln -s /mnt/absent/kvpool /var/lib/kvpool; "
        "ln -s /srv/absent.toml /etc/kvpool/kvpool.toml"
    )
    output = bare.run_script(f"dpkg --install /packages/{package.name}")
    assert "the daemon cannot use /var/lib/kvpool" in output
    assert bare.run_script("dpkg-query -W -f '${Status}' kvpool") == "install ok installed"
    assert bare.run_script("readlink /etc/kvpool/kvpool.toml") == "/srv/absent.toml\n"
    bare.run_script(
        "rm /var/lib/kvpool /etc/kvpool/kvpool.toml; mkdir /var/lib/kvpool2; touch /etc/kvpool/kvpool2.toml"
    )
    assert bare.run_script("dpkg --purge kvpool").splitlines()[-3:-1] == [
        "kept /etc/kvpool/kvpool2.toml",
        "kept /var/lib/kvpool2",
    ]
