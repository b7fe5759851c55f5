"""The service's files: the hardening of the unit, and the installation into a root directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.config.config import OPTIONS
from kvpool.server.lives import LASTING_S, WAIT_S_MAX
from kvpool.units import parse_duration

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "configs" / "kvpoold.service"
UNIT_PLACE = "usr/local/lib/systemd/system/kvpoold.service"
DROPIN_PLACE = "usr/local/lib/systemd/system/kvpoold.service.d/ssd-path.conf"
CONFIG_PLACE = "etc/kvpool/kvpool.toml"
# Of ten; as `--threshold` counts, in tenths.
EXPOSURE_TENTHS_MAX = 15


def _needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def _run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if name != "DESTDIR"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**inherited, **environment}
    )


def _install(root: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "scripts" / "install-service"), "--root", str(root), *arguments]
    return _run(*command, **environment)


@pytest.fixture
def kvpoold(tmp_path: Path) -> Path:
    """A program at the daemon's path."""
    program = tmp_path / "venv" / "bin" / "kvpoold"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def unit(tmp_path: Path, kvpoold: Path) -> Path:
    """The unit as it is installed."""
    root = tmp_path / "root"
    assert _install(root, "--kvpoold", str(kvpoold)).returncode == 0
    return root / UNIT_PLACE


def _value(text: str, name: str) -> str:
    found = re.findall(rf"(?m)^{name}=(.*)$", text)
    assert len(found) == 1, f"{name} is there {len(found)} times"
    return str(found[0])


@_needs("systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit(unit: Path) -> None:
    verified = _run("systemd-analyze", "verify", str(unit))
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@_needs("systemd-analyze")
def test_the_service_has_a_low_exposure_score(unit: Path) -> None:
    judged = _run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_TENTHS_MAX}", str(unit))
    assert judged.returncode == 0, judged.stdout[-200:]
    assert "Overall exposure level" in judged.stdout


def test_the_unit_gives_the_daemon_time_to_stop(unit: Path) -> None:
    text = unit.read_text()
    assert float(_value(text, "TimeoutStopSec")) > 2 * parse_duration(OPTIONS["server.stop_timeout"].default)
    assert float(_value(text, "WatchdogSec")) == 30
    assert float(_value(text, "StartLimitIntervalSec")) == 0, (
        "no start is refused: the daemon itself waits (test_lives)"
    )
    assert WAIT_S_MAX + float(_value(text, "WatchdogSec")) < LASTING_S, "a loop by the watchdog is braked too"
    assert (_value(text, "Type"), _value(text, "NotifyAccess")) == ("notify", "main")


def test_every_hardening_line_has_a_reason() -> None:
    hardening = UNIT.read_text().partition("# --- hardening")[2].partition("[Install]")[0].splitlines()[1:]
    directives = [number for number, line in enumerate(hardening) if line and not line.startswith("#")]
    assert len(directives) > 25
    for number in directives:
        assert hardening[number - 1].startswith("# "), f"{hardening[number]} has no reason"


def test_installing_puts_the_daemon_into_the_unit_and_prints_its_steps(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    done = _install(root, "--kvpoold", str(kvpoold))
    assert (done.returncode, done.stderr) == (0, "")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert sorted(done.stdout.splitlines()) == [f"installed {path}" for path in files]
    assert [str(path.relative_to(root)) for path in files] == [
        CONFIG_PLACE,
        "usr/local/lib/systemd/system/kvpoold.service",
        "usr/local/lib/systemd/system/kvpoold@.service",
        "usr/local/lib/sysusers.d/kvpool.conf",
        "usr/local/lib/tmpfiles.d/kvpool.conf",
        "usr/local/share/doc/kvpool/operations.md",
    ]
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in files)
    assert (root / CONFIG_PLACE).read_text() == (ROOT / "configs" / "kvpool.toml").read_text()
    text = (root / UNIT_PLACE).read_text()
    assert _value(text, "ExecStart") == f"{kvpoold} --config /etc/kvpool/kvpool%i.toml"
    assert re.search(r"@[A-Z]+@", text) is None, "a place was not filled in"


def test_installing_again_keeps_the_configuration(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    _install(root, "--kvpoold", str(kvpoold))
    (root / CONFIG_PLACE).write_text('[dram]\ncapacity = "8GiB"\n')
    again = _install(root, "--kvpoold", "/opt/kvpool/bin/kvpoold")
    assert f"kept {root / CONFIG_PLACE}\n" in again.stdout
    assert "8GiB" in (root / CONFIG_PLACE).read_text()
    assert "ExecStart=/opt/kvpool/bin/kvpoold " in (root / UNIT_PLACE).read_text()


@pytest.mark.parametrize(
    "text",
    [
        '[dram]\npath = "/wrong"\n[ssd]\n#path = "/wrong"\npath = "/mnt/nvme0/kvpool"  # it\n[events]\npath = "/wrong"\n',
        "[ ssd ] # here\ncapacity = '1TiB'\n  path='/mnt/nvme0/kvpool'\n",
        'ssd.path = "/mnt/nvme0/kvpool"\n[dram]\nssd.path = "/wrong"\n',
        'ssd = { capacity = "1TiB", path = "/mnt/nvme0/kvpool" }\n',
        '[ssd]\n"path" = """\n/mnt/nvme0/\\\n  kvpool"""\n',
        '[ssd]\npath = "/mnt/nv\\u006de0/kvpool"\n',
        '\ufeff[ssd]\npath = "/mnt/nvme0/kvpool"\n',
        '[peer]\nmembers = [\n"[ssd]",\n]\n[ssd]\npath = "/mnt/nvme0/kvpool"\n',
    ],
)
def test_the_service_may_write_to_the_disk_that_is_configured(tmp_path: Path, kvpoold: Path, text: str) -> None:
    root = tmp_path / "root"
    (root / "etc/kvpool").mkdir(parents=True)
    (root / CONFIG_PLACE).write_text(text)
    done = _install(root, "--kvpoold", str(kvpoold))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"installed {root / DROPIN_PLACE}\n" in done.stdout
    dropin = (root / DROPIN_PLACE).read_text()
    assert _value(dropin, "RequiresMountsFor") == "/mnt/nvme0/kvpool"
    assert _value(dropin, "ReadWritePaths") == "-/mnt/nvme0/kvpool"
    (root / CONFIG_PLACE).write_text('[ssd]\npath = "/var/lib/kvpool/ssd"\n')
    again = _install(root, "--kvpoold", str(kvpoold))
    assert f"removed {root / DROPIN_PLACE}\n" in again.stdout, "the state directory can be written anyway"
    assert not (root / DROPIN_PLACE).exists()
    _install(root, "--kvpoold", str(kvpoold))
    (root / CONFIG_PLACE).write_text('[ssd]\npath = "/mnt/my disk"\n')
    refused = _install(root, "--kvpoold", str(kvpoold))
    assert (refused.returncode, "has a character" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('[ssd]\npath = "mnt/nvme0"\n', "'mnt/nvme0'"),
        ('[ssd]\npath = "."\n', "'.'"),
        ("[ssd]\npath = 5\n", "5"),
        ("[ssd]\npath = true\n", "True"),
        ("[ssd]\npath = false\n", "False"),
        ("[ssd]\npath = []\n", "[]"),
        ('[ssd]\npath = "/"\n', "'/'"),
        ('[ssd]\npath = "/var/lib/kvpool/../../../etc"\n', "'/var/lib/kvpool/../../../etc'"),
        ('[ssd]\npath = "/mnt/./nvme0"\n', "'/mnt/./nvme0'"),
    ],
)
def test_what_is_no_absolute_path_gets_no_drop_in(tmp_path: Path, kvpoold: Path, text: str, shown: str) -> None:
    root = tmp_path / "root"
    (root / CONFIG_PLACE).parent.mkdir(parents=True)
    (root / CONFIG_PLACE).write_text(text)
    refused = _install(root, "--kvpoold", str(kvpoold))
    assert refused.returncode == 1
    assert f"write-ssd-dropin: ssd.path is {shown}, expected the absolute path of a directory" in refused.stderr
    assert not (root / DROPIN_PLACE).exists()
    (root / CONFIG_PLACE).write_text("ssd = '/mnt/nvme0'\n")
    refused = _install(root, "--kvpoold", str(kvpoold))
    assert (refused.returncode, "ssd is '/mnt/nvme0', expected a section" in refused.stderr) == (1, True)


def test_the_drop_in_of_a_second_instance_knows_its_own_directory(tmp_path: Path) -> None:
    config, dropin = tmp_path / "kvpool2.toml", tmp_path / "ssd-path.conf"
    command = [str(ROOT / "scripts/write-ssd-dropin"), str(config), str(dropin)]
    for path, is_written in (
        ("/var/lib/kvpool/ssd", True),
        ("/var/lib/kvpool2/ssd", False),
        ("/var/lib/kvpool22", True),
    ):
        config.write_text(f'[ssd]\npath = "{path}"\n')
        assert _run(*command, KVPOOL_PYTHON=sys.executable).returncode == 0
        assert dropin.exists() == is_written, path


def test_a_configuration_that_is_no_toml_gets_no_drop_in(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    (root / CONFIG_PLACE).parent.mkdir(parents=True)
    (root / CONFIG_PLACE).write_text("[ssd\n")
    refused = _install(root, "--kvpoold", str(kvpoold))
    assert refused.returncode == 1
    assert f"write-ssd-dropin: {root / CONFIG_PLACE} cannot be read: " in refused.stderr


def test_the_target_of_a_symbolic_link_may_be_written_too(tmp_path: Path, kvpoold: Path) -> None:
    root, link = tmp_path / "root", tmp_path / "ssd"
    link.symlink_to("/var/lib/kvpool/ssd")
    (root / CONFIG_PLACE).parent.mkdir(parents=True)
    (root / CONFIG_PLACE).write_text(f'[ssd]\npath = "{link}"\n')
    assert _install(root, "--kvpoold", str(kvpoold)).returncode == 0
    assert not (root / DROPIN_PLACE).exists(), "the state directory can be written anyway"
    link.unlink()
    link.symlink_to("/mnt/nvme0/kvpool")
    assert _install(root, "--kvpoold", str(kvpoold)).returncode == 0
    dropin = (root / DROPIN_PLACE).read_text()
    assert _value(dropin, "RequiresMountsFor") == f"{link} /mnt/nvme0/kvpool"
    assert _value(dropin, "ReadWritePaths") == f"-{link} -/mnt/nvme0/kvpool"


@_needs("systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit_with_its_disk(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    (root / "etc/kvpool").mkdir(parents=True)
    (root / CONFIG_PLACE).write_text('[ssd]\npath = "/mnt/nvme0/kvpool"\n')
    _install(root, "--kvpoold", str(kvpoold))
    verified = _run("systemd-analyze", "verify", str(root / UNIT_PLACE))
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    judged = _run(
        "systemd-analyze",
        "security",
        "--offline=true",
        f"--root={root}",
        f"--threshold={EXPOSURE_TENTHS_MAX}",
        "kvpoold.service",
    )
    assert judged.returncode == 0, judged.stdout[-200:] + judged.stderr


def test_the_daemon_is_found_on_the_path_and_make_passes_it_on(tmp_path: Path, kvpoold: Path) -> None:
    found = _install(tmp_path / "one", PATH=f"{kvpoold.parent}:{os.environ['PATH']}")
    assert found.returncode == 0
    assert f"ExecStart={kvpoold} " in (tmp_path / "one" / UNIT_PLACE).read_text()
    made = _run("make", "-C", str(ROOT), "install-service", f"DESTDIR={tmp_path / 'two'}", f"KVPOOLD={kvpoold}")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "two" / UNIT_PLACE).read_text() == (tmp_path / "one" / UNIT_PLACE).read_text()
    gone = _run("make", "-C", str(ROOT), "uninstall-service", f"DESTDIR={tmp_path / 'two'}")
    assert gone.returncode == 0, gone.stderr
    assert not (tmp_path / "two" / UNIT_PLACE).exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kvpoold", "/home/somebody/venv/bin/kvpoold"], "in a home directory"),
        (["--kvpoold", "bin/kvpoold"], "is no absolute path"),
        (["--kvpoold", "/opt/my pool/kvpoold"], "has a character"),
        (["--kvpoold", "/opt/%h/kvpoold"], "has a character"),
        (["--kvpoold"], "needs a path"),
        (["--force"], "unknown argument --force"),
    ],
)
def test_a_path_that_a_service_cannot_use_is_refused(tmp_path: Path, arguments: list[str], expected: str) -> None:
    refused = _install(tmp_path / "root", *arguments)
    assert refused.returncode == 1
    assert expected in refused.stderr
    assert not (tmp_path / "root").exists()


def test_uninstalling_removes_installed_files_and_keeps_data(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    _install(root, "--kvpoold", str(kvpoold))
    (root / "var/lib/kvpool").mkdir(parents=True)
    gone = _run(str(ROOT / "scripts" / "uninstall-service"), DESTDIR=str(root))
    assert (gone.returncode, gone.stderr) == (0, "")
    assert [path for path in root.rglob("*") if path.is_file()] == [root / CONFIG_PLACE]
    assert f"kept {root}/etc/kvpool\n" in gone.stdout
    assert f"kept {root}/var/lib/kvpool\n" in gone.stdout
    assert gone.stdout.count("removed ") == 5
    again = _run(str(ROOT / "scripts" / "uninstall-service"), DESTDIR=str(root))
    assert (again.returncode, again.stdout.count("removed ")) == (0, 0)


@_needs("systemd-sysusers")
@_needs("systemd-tmpfiles")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give directories to another user")
def test_systemd_makes_the_user_and_the_directories(tmp_path: Path, kvpoold: Path) -> None:
    root = tmp_path / "root"
    _install(root, "--kvpoold", str(kvpoold))
    made = _run("systemd-sysusers", f"--root={root}", "kvpool.conf")
    assert made.returncode == 0, made.stderr
    entry = (root / "etc/passwd").read_text().strip().split(":")
    assert (entry[0], entry[5:]) == ("kvpool", ["/var/lib/kvpool", "/usr/sbin/nologin"])
    made = _run("systemd-tmpfiles", f"--root={root}", "--create", "kvpool.conf")
    assert made.returncode == 0, made.stderr
    for directory, mode in (("run/kvpool", 0o750), ("var/lib/kvpool", 0o700)):
        status = (root / directory).stat()
        assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (mode, int(entry[2]), int(entry[3]))
