"""Options of the fleet: how many nodes, which router, what is between them. Main thread of a command."""

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvpool.errors import InvalidArgument
from kvpool.units import format_size, parse_duration, parse_size
from kvpool_tools.cli.number_range import NumberRange
from kvpool_tools.cli.simulation.options import SimulateOptions, listed, parse_blocks
from kvpool_tools.sim.traces import BLOCK_TOKENS
from studies.fleet.cell import PUBLISHED, ClusterSettings
from studies.fleet.remote_index import ENTRY_BYTES
from studies.fleet.routers import ROUTERS

NODES_MAX = 4096
SEED_MAX = (1 << 63) - 1
# Open files of a process beside one for each node.
OTHER_FILES = 64
CAPACITY_OF = ("node", "all")
# What each option is where it is not given. Rates and latencies are those of a network of 100 Gbit/s and of an NVMe disk; the
# delay, the index and the rate of computing are guesses, to be replaced by one's own.
DEFAULTS: dict[str, Any] = {
    "router": ROUTERS[0],
    "peers": "on",
    "store": None,
    "store_publish": PUBLISHED[0],
    "capacity_of": CAPACITY_OF[0],
    "network_gb_per_s": 10.0,
    "network_latency": "1ms",
    "disk_gb_per_s": 6.0,
    "disk_latency": "100us",
    "event_delay": "100ms",
    "peer_index": "128MiB",
    "prefill_tokens_per_s": 20_000.0,
    "seed": 0,
}
_RATE = NumberRange(min=1e-3, max=1e6)


def _option(name: str, metavar: str | None, text: str, kind: Any = None) -> Callable[..., Any]:
    default = DEFAULTS[name.removeprefix("--").replace("-", "_")]
    of_default = f" (default: {default:g})" if isinstance(default, (int, float)) else f" (default: {default})"
    return click.option(name, metavar=metavar, type=kind, help=f"{text}{of_default if default is not None else ''}.")


NODE_OPTIONS = (
    click.option(
        "--nodes", required=True, metavar="LIST", help="Numbers of nodes that share the requests, by comma: 1,2,4."
    ),
    _option("--router", "LIST", f"Models of the router, by comma: {', '.join(ROUTERS)}"),
    _option("--peers", None, "Whether nodes pull from one another", click.Choice(("on", "off"))),
    _option("--store", "C", "Capacity of a shared store, like one entry of --capacity"),
    _option("--store-publish", None, "What nodes write to the store", click.Choice(PUBLISHED)),
    _option("--capacity-of", None, "Whether capacities are each node's, or of all together", click.Choice(CAPACITY_OF)),
    _option("--network-gb-per-s", "R", "Each node's network link, each way", _RATE),
    _option("--network-latency", "D", "Until the first byte of a pull"),
    _option("--disk-gb-per-s", "R", "Each node's disk", _RATE),
    _option("--disk-latency", "D", "Until the first byte of a read"),
    _option("--event-delay", "D", "Until the others know of a change"),
    _option("--peer-index", "SIZE", f"Each node's index of the others' blocks, {ENTRY_BYTES} bytes each"),
    _option("--prefill-tokens-per-s", "R", "Each node's rate of computing", NumberRange(min=1.0, max=1e9)),
    _option("--seed", "N", "Of the router's choices", click.IntRange(0, SEED_MAX)),
)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options for many nodes. `store`: a capacity, None for no store."""

    nodes: tuple[int, ...]
    routers: tuple[str, ...]
    has_peers: bool
    store: str | None
    published: str
    is_capacity_of_all: bool
    network_bytes_per_s: float
    network_latency_s: float
    disk_bytes_per_s: float
    disk_latency_s: float
    event_delay_s: float
    index_entries: int
    tokens_per_s: float
    seed: int

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "NodeOptions":
        """The command's options by name, None where not given. Raises InvalidArgument."""
        _check_pairs(given)
        values = {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
        index_bytes = _size("--peer-index", values["peer_index"])
        if index_bytes < ENTRY_BYTES:
            raise InvalidArgument(
                f"--peer-index is {values['peer_index']!r}, expected {ENTRY_BYTES}B, one entry, at least"
            )
        return cls(
            nodes=_nodes(values["nodes"]),
            routers=_routers(values["router"]),
            has_peers=values["peers"] == "on",
            store=values["store"],
            published=values["store_publish"],
            is_capacity_of_all=values["capacity_of"] == "all",
            network_bytes_per_s=1e9 * values["network_gb_per_s"],
            network_latency_s=_duration("--network-latency", values["network_latency"]),
            disk_bytes_per_s=1e9 * values["disk_gb_per_s"],
            disk_latency_s=_duration("--disk-latency", values["disk_latency"]),
            event_delay_s=_duration("--event-delay", values["event_delay"]),
            index_entries=index_bytes // ENTRY_BYTES,
            tokens_per_s=values["prefill_tokens_per_s"],
            seed=values["seed"],
        )

    def settings(self, router: str, wanted: SimulateOptions, unique: int) -> ClusterSettings:
        """What is equal for each number of nodes. Raises InvalidArgument."""
        return ClusterSettings(
            router=router,
            seed=self.seed,
            block_bytes=wanted.block_bytes,
            has_peers=self.has_peers,
            index_entries=self.index_entries,
            event_delay_s=self.event_delay_s,
            store_blocks=0
            if self.store is None
            else parse_blocks(self.store, unique, wanted.block_bytes, option="--store"),
            published=self.published,
            network_bytes_per_s=self.network_bytes_per_s,
            network_latency_s=self.network_latency_s,
            disk_bytes_per_s=self.disk_bytes_per_s,
            disk_latency_s=self.disk_latency_s,
            block_compute_s=BLOCK_TOKENS / self.tokens_per_s,
        )

    def describe(self) -> str:
        """What is between the nodes, for a table's title."""
        peers = (
            f"peers with an index of {format_size(self.index_entries * ENTRY_BYTES)}" if self.has_peers else "no peers"
        )
        store = "no store" if self.store is None else f"a store of {self.store} ({self.published})"
        return f"{peers}, {store}, seed {self.seed}"


def allow_files(nodes: int) -> None:
    """Allow this process and those it starts one open file for each node. Raises InvalidArgument."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InvalidArgument(
            f"--nodes {nodes} needs {needed} open files, and the hard limit is {hard}: raise it (ulimit -Hn), or ask for fewer"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_pairs(given: Mapping[str, Any]) -> None:
    """Refuse options that would have no effect."""
    if given["store_publish"] is not None and given["store"] is None:
        raise InvalidArgument("--store-publish goes with --store, expected both or neither")
    if given["peer_index"] is not None and given["peers"] == "off":
        raise InvalidArgument("--peer-index goes with --peers on, expected one of them")


def _nodes(text: str) -> tuple[int, ...]:
    entries = listed("--nodes", text)
    for entry in entries:
        if not (entry.isascii() and entry.isdecimal() and 1 <= int(entry) <= NODES_MAX):
            raise InvalidArgument(f"--nodes has {entry!r}, expected numbers 1..{NODES_MAX}")
    return tuple(dict.fromkeys(map(int, entries)))


def _routers(text: str) -> tuple[str, ...]:
    chosen = listed("--router", text)
    for name in chosen:
        if name not in ROUTERS:
            raise InvalidArgument(f"--router has {name!r}, expected {', '.join(ROUTERS)}")
    return tuple(dict.fromkeys(chosen))


def _duration(option: str, text: str) -> float:
    try:
        return parse_duration(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from error


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error}") from error
