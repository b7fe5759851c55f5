"""NUMA nodes of the machine, and the placement of the arena's pages on them. Any thread."""

import os
from pathlib import Path

import kvpool_native
from kvpool.errors import ConfigError

ONLINE = Path("/sys/devices/system/node/online")
DEFAULT = "default"
INTERLEAVE = "interleave"


def online_nodes(path: Path = ONLINE) -> list[int]:
    """The numbers of the machine's nodes; node 0 alone where the kernel does not report them."""
    try:
        text = path.read_text().strip()
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def check_numa(where: str) -> None:
    """Raises ConfigError where this machine has no memory on the node that `where` names."""
    online = online_nodes()
    if where not in (DEFAULT, INTERLEAVE) and int(where) not in online:
        has = ", ".join(map(str, online))
        raise ConfigError([f"dram.numa is {where!r}; this machine has memory on nodes {has}"])


def place_arena(arena: kvpool_native.Mapping, where: str) -> None:
    """Place an arena's pages on all nodes in turn, or on the node that `where` names. Raises ConfigError."""
    if where == DEFAULT:
        return
    online = online_nodes()
    nodes = online if where == INTERLEAVE else [int(where)]
    error = kvpool_native.place_on_nodes(arena, nodes, in_turns=where == INTERLEAVE)
    if error:
        has = ", ".join(map(str, online))
        raise ConfigError([f"dram.numa is {where!r}: {os.strerror(error)}; this machine has memory on nodes {has}"])
