"""The machines that packages are tried on are bare, offline, and keep nothing."""

from collections.abc import Callable

from tests.packages.roots import Machine


def test_a_machine_is_bare_offline_and_gone_afterwards(machine: Callable[[str], Machine]) -> None:
    first, second = machine("bookworm"), machine("bookworm")
    assert first.try_script("command -v python3 || command -v cc").returncode != 0
    assert first.run_script("ls /sys/class/net").split() == ["lo"]
    first.run_script("echo kept >/etc/kept; test -e /etc/kept")
    assert second.try_script("test -e /etc/kept").returncode == 1
    first.run_script("apt-get install --no-download --yes --no-install-recommends python3 >/dev/null")
    assert first.run_script("id -un; python3 -c 'print(6 * 7)'", user="nobody").split() == ["nobody", "42"]
