"""`kvpoolctl config` of a live daemon: the values in force, and where each was written, before and after a reload."""

import json
from pathlib import Path

from tests.rigs.daemon import Daemon
from tests.rigs.kvpoolctl import ctl


def test_the_configuration_in_force_has_the_source_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('[server]\nlease_ttl = "20s"\nmax_leases = 100\n')
    daemon = Daemon(tmp_path)
    with daemon:
        daemon.stop()
        daemon.start("--config", str(file))
        text = ctl(daemon, "config").stdout
        assert 'server.lease_ttl = "20s"' in text
        assert f"  # {file}:2\n" in text
        assert 'server.reservation_ttl = "60s"' in text
        file.write_text('# written again\n[server]\nlease_ttl = "25s"\nmax_leases = 200\n')
        assert ctl(daemon, "reload").exit_code == 0
        assert ctl(daemon, "log-level", "debug").exit_code == 0
        options = json.loads(ctl(daemon, "config", "--json").stdout)
        assert options["server.lease_ttl"] == {"value": "25s", "source": f"{file}:3"}
        assert options["server.max_leases"] == {"value": 100, "source": f"{file}:3"}, "as at the start"
        assert options["dram.capacity"] == {"value": "16MiB", "source": "--set"}
        assert options["ssd.io"] == {"value": "auto", "source": "default"}
        assert options["log.level"] == {"value": "debug", "source": "an operator's order"}


def test_a_section_alone_is_shown_and_an_unknown_one_refused(shared_daemon: Daemon) -> None:
    lines = ctl(shared_daemon, "config", "log").stdout.splitlines()
    assert lines == ['log.level = "info"  # --set']
    refused = ctl(shared_daemon, "config", "tape")
    assert refused.exit_code == 2
    assert "'tape' is no section, expected one of server, " in refused.stderr
