"""The package's unit under systemd: everything configured, restarted and reloaded, and upgraded while a client goes on."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packages.debian import PYTHON, SOCKET, info, install_package, repack, try_round_trip
from tests.packages.roots import SYSTEMD, TREE, Machine
from tests.rigs.device.emulated import driver_path

HERE = Path(__file__).parent
OTHER = "/run/kvpool/other.sock"
# Another node, by hand and as the service's user: streams under TLS.
OTHER_NODE = f"""systemd-run --quiet --unit=other --uid=kvpool --gid=kvpool kvpoold --set server.socket={OTHER}
  --set dram.capacity=64MiB --set peer.name=other --set peer.listen=tcp://127.0.0.1:9480 --set peer.stream=tcp://127.0.0.1:9481
  --set peer.shm=false --set 'peer.members=127.0.0.1:9470, 127.0.0.1:9480' --set peer.keys=/etc/kvpool/node.key
  --set peer.allow=/etc/kvpool/allow --set peer.encrypt=true""".replace("\n", " ")
PROBES = 1  # chunks that the daemon's own probe may have stored
# What an operator wrote, before the upgrade.
EDITED = """[dram]
capacity = "64MiB"  # ours

[ssd]
path = "/var/lib/kvpool/ssd"
create = true
capacity = "256MiB"
"""


@pytest.fixture
def booted(machine: Callable[..., Machine]) -> Machine:
    """A machine whose first process is systemd."""
    return machine("bookworm", SYSTEMD)


def _unit(booted: Machine, name: str, unit: str = "kvpoold") -> str:
    return booted.run_script(f"systemctl show {unit} --property={name} --value").strip()


def _await(booted: Machine, condition: str) -> None:
    """Wait until a shell command ends with 0."""
    booted.run_script(f"for _ in $(seq 200); do if {condition}; then exit 0; fi; sleep 0.1; done; exit 1")


def test_everything_runs_under_the_unit(booted: Machine, built: Callable[[str], Path]) -> None:
    install_package(booted, built("kvpool_*.deb"))
    booted.run_script(
        f"install -m 0644 {booted.share_file(Path(driver_path()))} /usr/lib/kvpool/emulated-driver.so\n"
        f"install -m 0644 {booted.share_file(HERE / 'everything_on.toml')} /etc/kvpool/kvpool.toml\n"
        "kvpoolctl keygen /etc/kvpool/node.key >/etc/kvpool/allow; chown kvpool:kvpool /etc/kvpool/node.key\n"
        "systemctl start kvpoold"
    )
    assert _unit(booted, "ActiveState") == "active"
    booted.run_script(OTHER_NODE)
    _await(booted, "kvpoolctl peers 2>/dev/null | grep -q following")
    try_round_trip(booted)
    shown = info(booted)
    assert (shown["health"], shown["problems"], shown["hbm_state"]) == ("ready", "", "ok")
    try_round_trip(booted, OTHER)
    booted.run_script(f"kvpoolctl --socket {OTHER} stats peer | grep '^peer.links.ready:1$'")

    # A person may restart it as often as they like.
    booted.run_script("for _ in 1 2 3 4 5 6 7; do systemctl restart kvpoold; done")
    assert _unit(booted, "NRestarts") == "0"
    # A kill is one: the daemon comes back by itself.
    booted.run_script("systemctl kill --signal=SIGKILL kvpoold")
    _await(booted, '[ "$(systemctl show kvpoold --property=NRestarts,ActiveState --value | xargs)" = "1 active" ]')
    assert info(booted)["early_ends"] == "1"

    booted.run_script("systemctl stop kvpoold other")
    assert booted.try_script("ls /run/kvpool/kvpool.sock.lock").returncode != 0
    journal = booted.run_script("journalctl --no-pager -u kvpoold").lower()
    assert "operation not permitted" not in journal
    assert "is discarded" not in journal


def _chunks(booted: Machine, tier: str) -> int:
    return int(booted.run_script(f"kvpoolctl stats {tier} | sed -n s/^{tier}.chunks://p"))


def _dram_began(booted: Machine) -> str:
    return info(booted)["dram_began"]


def test_dram_outlives_kills_and_restarts_and_a_stop_writes_it_down(
    booted: Machine, built: Callable[[str], Path]
) -> None:
    """systemd of Debian 12 keeps what it has stored over both, and lets it go at a stop."""
    install_package(booted, built("kvpool_*.deb"))
    booted.run_script(f"cat >/etc/kvpool/kvpool.toml <<'END'\n{EDITED}END\nsystemctl start kvpoold")
    _await(booted, "kvpoolctl stats ssd | grep -qx ssd.state:ok")
    try_round_trip(booted)
    saved = _chunks(booted, "dram")
    assert saved > 1
    assert (info(booted)["dram_kept_by"], _dram_began(booted)) == ("systemd", "empty: nothing was kept")
    assert _unit(booted, "NFileDescriptorStore") == "5"

    booted.run_script("systemctl kill --signal=SIGKILL kvpoold")
    _await(booted, '[ "$(systemctl show kvpoold --property=NRestarts,ActiveState --value | xargs)" = "1 active" ]')
    assert _dram_began(booted).startswith("from life 1: ")
    assert _chunks(booted, "dram") >= saved - PROBES
    booted.run_script("kvpoolctl check")

    booted.run_script("systemctl restart kvpoold")
    assert _dram_began(booted).startswith("from life 2: ")
    assert _chunks(booted, "dram") >= saved - PROBES
    booted.run_script("kvpoolctl check")
    assert "left in memory alone, with systemd" in booted.run_script("journalctl --no-pager -u kvpoold")
    assert _unit(booted, "NFileDescriptorStore") == "5"

    # By hand it is one, too: the unit begins again by itself, and nothing counts as a failure.
    booted.run_script("systemctl kill --signal=SIGINT --kill-who=main kvpoold")
    _await(booted, '[ "$(systemctl show kvpoold --property=NRestarts,ActiveState --value | xargs)" = "1 active" ]')
    assert _dram_began(booted).startswith("from life 3: ")
    assert info(booted)["early_ends"] == "0"
    assert "Failed with result" not in booted.run_script("journalctl --no-pager -u kvpoold | grep -v signal")

    booted.run_script("systemctl stop kvpoold")
    assert "0 left in memory alone, with systemd, durable: yes" in booted.run_script("journalctl --no-pager -u kvpoold")
    booted.run_script("systemctl start kvpoold")
    assert _dram_began(booted) == "empty: nothing was kept"
    _await(booted, "kvpoolctl stats ssd | grep -qx ssd.state:ok")
    assert _chunks(booted, "ssd") >= saved - PROBES


def test_a_keeper_of_a_unit_without_a_store_would_end_with_it(booted: Machine, built: Callable[[str], Path]) -> None:
    install_package(booted, built("kvpool_*.deb"))
    booted.run_script(
        "dropins=/etc/systemd/system/kvpoold.service.d; mkdir -p $dropins\n"
        "printf '[Service]\\nFileDescriptorStoreMax=0\\n' >$dropins/none.conf\n"
        "systemctl daemon-reload; systemctl start kvpoold"
    )
    assert info(booted)["dram_kept_by"].startswith("nobody: the unit has no store for it")
    booted.run_script("echo '[server]\nkeep_memory = \"keeper\"' >/etc/kvpool/kvpool.toml; systemctl restart kvpoold")
    assert info(booted)["dram_kept_by"].startswith("kvpool-keeper (process ")
    booted.run_script("systemctl kill --signal=SIGKILL --kill-who=main kvpoold")
    _await(booted, '[ "$(systemctl show kvpoold --property=NRestarts,ActiveState --value | xargs)" = "1 active" ]')
    assert _dram_began(booted) == "empty: nothing was kept"


def test_a_second_instance_is_set_up_as_the_page_says(booted: Machine, built: Callable[[str], Path]) -> None:
    install_package(booted, built("kvpool_*.deb"))
    page = (TREE / "docs/operations.md").read_text().partition("\n### A second instance\n")[2]
    copy, *lines = page.partition("```\n")[2].partition("```")[0].splitlines()
    booted.run_script(f"{copy}\ninstall -d -m 700 -o kvpool -g kvpool /srv/kvpool2; systemctl start kvpoold")
    edited = '[dram]\ncapacity = "64MiB"\n[ssd]\npath = "/srv/kvpool2"\ncapacity = "64MiB"\n'
    booted.run_script(f"cat >/etc/kvpool/kvpool2.toml <<'END'\n{edited}END")
    output = booted.run_script("\n".join(lines))
    # It has looked at its own place, not at the first one's.
    assert "no fault for a daemon at /run/kvpool2/kvpool.sock\n" in output
    assert re.search(r"(?m)^socket:/run/kvpool2/kvpool.sock$", output), output
    _await(booted, "kvpoolctl --socket /run/kvpool2/kvpool.sock stats ssd | grep -qx ssd.state:ok")
    try_round_trip(booted, "/run/kvpool2/kvpool.sock")
    booted.run_script("systemctl reload kvpoold@2")
    assert "started by hand" not in booted.run_script("dpkg --remove kvpool")
    assert booted.try_script("grep -las ^/usr/lib/kvpool /proc/[0-9]*/cmdline").stdout == ""
    dropin = "/etc/systemd/system/kvpoold@2.service.d/ssd-path.conf"
    # An operator wrote it: it is there for the next installation.
    booted.run_script(f"test -e {dropin}; dpkg --purge kvpool")
    assert booted.try_script(f"test -e {dropin}").returncode == 1


def test_a_reload_needs_no_program_and_refuses_a_fault(booted: Machine, built: Callable[[str], Path]) -> None:
    install_package(booted, built("kvpool_*.deb"))
    assert booted.try_script("test -e /bin/kill").returncode == 1
    booted.run_script("echo '[log]\nlevel = \"debug\"' >/etc/kvpool/kvpool.toml; systemctl start kvpoold")
    before = _unit(booted, "MainPID")
    booted.run_script("echo '[log]\nlevel = \"warning\"' >/etc/kvpool/kvpool.toml; systemctl reload kvpoold")
    _await(booted, "kvpoolctl log-level | grep -q warning")
    booted.run_script("echo '[log]\nlevel = \"apples\"' >/etc/kvpool/kvpool.toml")
    assert booted.try_script("systemctl reload kvpoold").returncode != 0
    assert (_unit(booted, "ActiveState"), _unit(booted, "MainPID")) == ("active", before)


def test_an_upgrade_asks_nothing_and_clients_go_on(
    booted: Machine, built: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = built("kvpool_*.deb")

    def make_older(root: Path) -> None:
        """An earlier version, which had the reference as the configuration."""
        control = root / "DEBIAN/control"
        control.write_text(re.sub(r"(?m)^Version: .*", "Version: 0.1.0~before", control.read_text()))
        (root / "etc/kvpool").mkdir(parents=True)
        (root / "etc/kvpool/kvpool.toml").write_bytes((TREE / "configs/kvpool.toml").read_bytes())
        (root / "DEBIAN/conffiles").write_text("/etc/kvpool/kvpool.toml\n")

    install_package(booted, repack(package, tmp_path / "older", make_older))
    booted.run_script(f"cat >/etc/kvpool/kvpool.toml <<'END'\n{EDITED}END\nsystemctl enable --quiet --now kvpoold")
    before = _unit(booted, "MainPID")
    client = f"exec {PYTHON} -I {booted.share_file(HERE / 'steady_client.py')} {SOCKET} /packages/end"
    with subprocess.Popen(booted.words(client), stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "loaded\n"
        started = time.monotonic()
        install_package(booted, package)
        upgrade_s = time.monotonic() - started
        time.sleep(2)
        (booted.shared / "end").touch()
        shown = dict(line.split(":") for line in engine.communicate(timeout=60)[0].splitlines())
    assert engine.returncode == 0
    with capsys.disabled():
        print(f"\nupgraded in {upgrade_s:.1f} s; a client's loads missed for {shown['away_s']} s; {shown}")
    assert booted.run_script("dpkg-query -W -f '${Version}' kvpool") != "0.1.0~before"
    assert booted.run_script("cat /etc/kvpool/kvpool.toml; ls /etc/kvpool") == EDITED + "kvpool.toml\n"
    assert _unit(booted, "ActiveState") == "active"
    assert _unit(booted, "MainPID") not in (before, "0")
    # Loads and saves went on, of the chunks that were in memory meanwhile.
    assert _dram_began(booted).startswith("from life 1: ")
    assert float(shown["last_s"]) < 1
    assert int(shown["saved_since"]) > 0
    assert info(booted)["ssd_state"] == "ok"
