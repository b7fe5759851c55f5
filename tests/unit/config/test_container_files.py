"""The files for containers: they parse, the daemon accepts their options, and both sides share one directory."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpool.config.config import OPTIONS, load_config
from kvpool.units import parse_duration
from kvpool_tools.cli.kvpoolctl import TIMEOUT

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "compose.yaml").read_text())
DAEMONSET: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "daemonset.yaml").read_text())
POD = DAEMONSET["spec"]["template"]["spec"]
GIB = 1 << 30


@pytest.mark.parametrize(
    ("command", "grace_s", "memory"),
    [
        (COMPOSE["services"]["kvpoold"]["command"], 660, COMPOSE["services"]["kvpoold"]["mem_limit"]),
        (
            POD["containers"][0]["command"],
            POD["terminationGracePeriodSeconds"],
            POD["containers"][0]["resources"]["limits"]["memory"],
        ),
    ],
    ids=["compose", "daemonset"],
)
def test_the_daemon_takes_the_options_and_has_the_room(command: list[str], grace_s: int, memory: str) -> None:
    config = load_config(None, [word.removeprefix("--set=") for word in command if word.startswith("--set=")])
    assert (config.server.socket, config.server.metrics_socket) == (
        "/run/kvpool/kvpool.sock",
        "/run/kvpool/metrics.sock",
    )
    assert grace_s > config.server.stop_timeout + config.ssd.stop_timeout
    token_ids = config.dram.token_ids or config.dram.capacity // 16
    assert int(re.sub(r"\D", "", memory)) * GIB > config.dram.capacity + config.dram.segment + token_ids + GIB


def test_the_compose_file_grants_the_stop_time_and_shares_one_directory() -> None:
    daemon, engine = COMPOSE["services"]["kvpoold"], COMPOSE["services"]["engine"]
    assert (daemon["stop_grace_period"], daemon["memswap_limit"]) == ("11m", daemon["mem_limit"])
    assert "/run/kvpool:/run/kvpool" in daemon["volumes"]
    assert "/run/kvpool:/run/kvpool" in engine["volumes"]
    uid, gid = daemon["user"].split(":")
    assert (engine["environment"]["KVPOOL_DAEMON_UID"], engine["group_add"]) == (uid, [gid])


def test_the_daemonset_mounts_what_it_names() -> None:
    volumes = {volume["name"] for volume in POD["volumes"]}
    for container in (*POD["containers"], *POD["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    labels = DAEMONSET["spec"]["template"]["metadata"]["labels"]
    assert DAEMONSET["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_daemon_that_hangs_is_reported_before_a_probe_gives_up() -> None:
    """The command waits for a welcome and for an answer; half of the time is left for its start."""
    container = POD["containers"][0]
    probes = [container[name]["timeoutSeconds"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    check = COMPOSE["services"]["kvpoold"]["healthcheck"]["timeout"]
    assert min(*probes, parse_duration(check)) >= 4 * parse_duration(TIMEOUT)


def test_the_page_names_options_that_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n## Containers\n")[2]
    assert "dram.capacity" in page
    for option in re.findall(r"\b(?:server|dram|ssd|events)\.[a-z_]+", page):
        assert option in OPTIONS, f"{option} is no option"
