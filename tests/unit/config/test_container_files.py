"""The file for containers: it parses, the daemon accepts its options, and both sides share one directory.

`make test-packages` starts them as it says, and tries the chart.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from kvpool.config.config import OPTIONS, load_config

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "compose.yaml").read_text())
GIB = 1 << 30


def test_the_daemon_takes_the_options_and_has_the_room() -> None:
    daemon = COMPOSE["services"]["kvpoold"]
    words = [word.removeprefix("--set=") for word in daemon["command"] if word.startswith("--set=")]
    config = load_config(None, words)
    assert (config.server.socket, config.server.metrics_socket) == (
        "/run/kvpool/kvpool.sock",
        "/run/kvpool/metrics.sock",
    )
    assert config.server.stop_timeout + config.ssd.stop_timeout < 660
    token_ids = config.dram.token_ids or config.dram.capacity // 16
    memory = int(re.sub(r"\D", "", daemon["mem_limit"])) * GIB
    assert memory > config.dram.capacity + config.dram.segment + token_ids + GIB


def test_the_compose_file_grants_the_stop_time_and_shares_one_directory() -> None:
    daemon, engine = COMPOSE["services"]["kvpoold"], COMPOSE["services"]["engine"]
    assert (daemon["stop_grace_period"], daemon["memswap_limit"]) == ("11m", daemon["mem_limit"])
    assert "/run/kvpool:/run/kvpool" in daemon["volumes"]
    assert "/run/kvpool:/run/kvpool" in engine["volumes"]
    uid, gid = daemon["user"].split(":")
    assert (engine["environment"]["KVPOOL_DAEMON_UID"], engine["group_add"]) == (uid, [gid])


def test_the_page_names_options_that_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n## Containers\n")[2]
    assert "dram.capacity" in page
    for option in re.findall(r"\b(?:server|dram|ssd|events)\.[a-z_]+", page):
        assert option in OPTIONS, f"{option} is no option"
