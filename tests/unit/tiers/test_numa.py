"""NUMA nodes of the arena: the configured ones, the kernel's report of them, and nodes that do not exist."""

from pathlib import Path

import pytest

import kvpool_native
from kvpool.errors import ConfigError
from kvpool.tiers.dram.numa import DEFAULT, INTERLEAVE, online_nodes, place_arena

SIZE = 1 << 20
NAME = "kvpool-numa-test"


def policy_of(mapping: kvpool_native.Mapping) -> str:
    """The kernel's policy for a mapping's pages: default, bind:0, interleave:0 …"""
    assert mapping.size == SIZE
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:
        pytest.skip("this kernel knows no NUMA nodes")
    return next(line.split()[1] for line in lines if NAME in line)


@pytest.mark.parametrize("where", [DEFAULT, INTERLEAVE, "0"])
def test_pages_come_from_the_configured_nodes(where: str) -> None:
    arena = kvpool_native.Mapping.create(NAME, SIZE)
    place_arena(arena, where)
    arena.populate(0, SIZE)
    policy = policy_of(arena)
    expected = {DEFAULT: "default", INTERLEAVE: "interleave:", "0": "bind:0"}[where]
    assert policy.startswith(expected)


@pytest.mark.parametrize("node", ["999", "1023"])
def test_a_missing_node_is_refused_by_name(node: str) -> None:
    arena = kvpool_native.Mapping.create(NAME, SIZE)
    with pytest.raises(
        ConfigError, match=rf"dram.numa is '{node}'.*this machine has memory on nodes {online_nodes()[0]}"
    ):
        place_arena(arena, node)


def test_lists_of_nodes_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "online"
    file.write_text("0-2,5,7-8\n")
    assert online_nodes(file) == [0, 1, 2, 5, 7, 8]
    assert online_nodes(tmp_path / "none") == [0]
