"""Connections against the limit of file descriptors."""

import re

import pytest

from kvpool.config.config import load_config
from kvpool.errors import ConfigError
from kvpool.server.descriptor_room import OWN_DESCRIPTORS, PeerRoom, plan_descriptors

SSD = ("ssd.path=/disk", "ssd.capacity=1GiB", "ssd.segment=16MiB")


@pytest.mark.parametrize(("options", "fitting"), [((), 500), (SSD, 500 - 58), (("server.write_mode=copy",), 250)])
def test_with_room_for_some_these_are_served_and_the_shortage_is_named(options: tuple[str, ...], fitting: int) -> None:
    room = plan_descriptors(load_config(None, ["server.max_connections=1000", *options]), OWN_DESCRIPTORS + 500)
    assert room.connections == fitting
    assert "server.max_connections is 1000, which takes" in room.shortage
    assert f"the process may have {OWN_DESCRIPTORS + 500}" in room.shortage
    assert f"{fitting} connections are served at a time" in room.shortage


def test_without_room_for_a_few_the_start_is_refused() -> None:
    config = load_config(None, [*SSD])
    with pytest.raises(ConfigError, match=r"raise the limit, or ssd\.segment"):
        plan_descriptors(config, 256)


PEERS = ("peer.listen=tcp://127.0.0.1:9470", "peer.stream=tcp://127.0.0.1:9471")


@pytest.mark.parametrize("limit", [1024, 4096, 20_000, 65_536])
def test_other_nodes_have_a_part_of_their_own_and_engines_the_rest(limit: int) -> None:
    room = plan_descriptors(load_config(None, ["server.max_connections=1000", *PEERS]), limit)
    assert OWN_DESCRIPTORS + room.connections + room.peers.descriptors <= limit
    assert room.peers.descriptors <= limit / 4
    assert room.connections >= min(1000, limit / 2)
    if limit >= 20_000:
        assert (room.connections, room.peers) == (1000, PeerRoom())


def test_routers_have_a_part_of_their_own() -> None:
    events = ("events.publish=ipc:///run/kvpool/events", "events.replay=ipc:///run/kvpool/replay")
    config = load_config(None, ["server.max_connections=1000", *events])
    assert config.events.descriptors > 0
    room = plan_descriptors(config, OWN_DESCRIPTORS + 800)
    assert room.connections == 600, "a quarter at most"
    assert "and 200 for routers" in room.shortage
    whole = config.events.descriptors
    assert plan_descriptors(config, OWN_DESCRIPTORS + 4 * whole).connections == min(1000, 3 * whole)


def test_other_nodes_are_named_where_they_leave_too_little() -> None:
    room = plan_descriptors(load_config(None, ["server.max_connections=1000", *PEERS]), 1024)
    assert "for other nodes, and the process may have 1024" in room.shortage


def test_a_limit_below_what_the_daemon_needs_itself_is_refused_without_negative_numbers() -> None:
    config = load_config(None, ["events.publish=ipc:///run/kvpool/events"])
    with pytest.raises(
        ConfigError, match=r"and the process may have 64 \(LimitNOFILE= of the unit, ulimit -n\)"
    ) as refused:
        plan_descriptors(config, 64)
    assert not re.search(r"-\d", str(refused.value))
