"""Daemons on hosts of their own: each in a network namespace, with a CURVE pair, joined by cables or by a bad network.

Every node lists all others. The same ports everywhere: each host has them for itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import kvpool_client as kv
from kvpool.config.curve_keys import KeyPair, make_key_pair, write_key_file
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.namespaces import Host
from tests.rigs.nodes.proxy import Proxy, Weather
from tests.rigs.payload import assert_right_bytes, tokens_of

CONTROL_PORT, STREAM_PORT = 9470, 9471
# Short enough for tests, long enough for a busy machine.
ANSWER_S, STALL_S, PULL_S = 2.0, 1.0, 4.0
TIMES = {
    "peer.answer_timeout": f"{1000 * ANSWER_S:.0f}ms",
    "peer.stall_timeout": f"{1000 * STALL_S:.0f}ms",
    "peer.pull_timeout": f"{1000 * PULL_S:.0f}ms",
}
# Beyond a deadline, until a client knows: the machine may be busy.
GRACE_S = 60.0


class HostedDaemon(Daemon):
    """A daemon on a host."""

    def __init__(self, host: Host, directory: Path, **options: str) -> None:
        super().__init__(directory, **options)
        self.host = host

    def __enter__(self) -> "HostedDaemon":
        super().__enter__()
        return self

    def command(self) -> list[str]:
        """The command line."""
        return [*self.host.prefix, *super().command()]


@dataclass
class Node:
    """One node: its host, its keys, and the options of its daemon."""

    name: str
    host: Host
    directory: Path
    pair: KeyPair
    options: dict[str, str] = field(default_factory=dict)

    @property
    def member(self) -> str:
        """Its entry in the others' lists."""
        return f"{self.host.address}:{CONTROL_PORT} {self.pair.public.decode()}"

    def daemon(self, **further: str) -> HostedDaemon:
        """Its daemon, not started. Options are `section__key="value"`."""
        named = {name.replace("__", "."): value for name, value in further.items()}
        return HostedDaemon(self.host, self.directory, **{**self.options, **named})


@dataclass
class Network:
    """All nodes, and the weather between any two of them where a proxy is between them: `control` and `stream`, by the name of
    the node that is asked."""

    nodes: dict[str, Node]
    control: dict[str, Weather]
    stream: dict[str, Weather]
    proxy: Proxy | None = None

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def middle(self) -> Proxy:
        """What is between the nodes."""
        assert self.proxy is not None
        return self.proxy


@contextmanager
def network(
    directory: Path, names: Sequence[str], *, seed: int | None = None, allowed: Sequence[str] = ()
) -> Iterator[Network]:
    """Hosts for these nodes, joined by cables, or with a seed by a proxy. `allowed`: whose keys count; empty: everybody's."""
    with ExitStack() as stack:
        nodes: dict[str, Node] = {}
        for number, name in enumerate(names, 1):
            host = stack.enter_context(Host(f"10.9.0.{number}"))
            nodes[name] = Node(name, host, directory / name, make_key_pair())
        admitted = "\n".join(nodes[name].pair.public.decode() for name in allowed or names)
        for node in nodes.values():
            node.directory.mkdir()
            write_key_file(str(node.directory / "key"), node.pair)
            (node.directory / "allow").write_text(f"{admitted}\n")
            node.options = {
                "peer.listen": f"tcp://{node.host.address}:{CONTROL_PORT}",
                "peer.stream": f"tcp://{node.host.address}:{STREAM_PORT}",
                "peer.name": node.name,
                "peer.shm": "false",  # they stand for nodes on hosts of their own
                "peer.members": ", ".join(other.member for other in nodes.values()),
                "peer.keys": str(node.directory / "key"),
                "peer.allow": str(node.directory / "allow"),
                **TIMES,
            }
        made = Network(nodes, {name: Weather() for name in names}, {name: Weather() for name in names})
        if seed is not None:
            made.proxy = stack.enter_context(Proxy(seed))
        listed = list(nodes.values())
        for number, one in enumerate(listed):
            for other in listed[:number]:
                _connect(stack, made, one, other)
        yield made


def _connect(stack: ExitStack, made: Network, one: Node, other: Node) -> None:
    if made.proxy is None:
        one.host.join(other.host)
        return
    gates = {node.name: stack.enter_context(Host(node.host.address)) for node in (one, other)}
    one.host.join(gates[other.name])
    other.host.join(gates[one.name])
    for node in (one, other):
        far = gates[other.name if node is one else one.name]
        ports = {CONTROL_PORT: made.control[node.name], STREAM_PORT: made.stream[node.name]}
        made.proxy.lead(gates[node.name], far, ports)


@contextmanager
def ends_within(seconds: float, option: str) -> Iterator[None]:
    """What is done here ends by the deadline that the option sets."""
    begun_s = time.monotonic()
    yield
    took_s = time.monotonic() - begun_s
    assert took_s < seconds + GRACE_S, f"took {took_s:.2f} s, {option} allows {seconds} s"


def chain_of(pool: kv.Pool, seed: int, chunks: int) -> kv.KeyChain:
    """Keys of a prompt that depends on the seed."""
    return pool.keys(tokens_of(seed, chunks * pool.layout.chunk_tokens))


def wait_known(pool: kv.Pool, keys: kv.KeyChain, chunks: int) -> None:
    """Until the pool's daemon has or knows so many chunks of a chain."""
    wait_until(lambda: pool.lookup(keys).chunks == chunks, f"{chunks} chunks are known")


def load(pool: kv.Pool, keys: kv.KeyChain, layout: kv.Layout = SMALL) -> kv.LoadResult:
    """Load what there is of a chain, and compare every byte that counts."""
    found = pool.lookup(keys)
    into = np.zeros((max(1, found.chunks), layout.chunk_bytes), np.uint8)
    with pool.acquire(found) as lease:
        result = pool.load(lease, into=into[: lease.chunks]).wait()
    assert_right_bytes(keys, layout, result, into)
    return result
