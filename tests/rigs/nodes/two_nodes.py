"""Two daemons that are peers: on loopback addresses, or each in a network namespace of its own, with keys, where there is root.

Engines reach their daemon over its unix socket, which is in no namespace: only what daemons send each other crosses the cable.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import permutations
from pathlib import Path

from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.protocol import versions
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.router_events.columns import unpack_chunks
from kvpool.states import NODE_TIERS
from kvpool_native import Mapping, RemoteView
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.runs.ports import free_port

NAMES = ("one", "other")
ADDRESSES = ("192.0.2.1", "192.0.2.2")
CONTROL_PORT, STREAM_PORT = 9470, 9471


class PeerDaemon(Daemon):
    """A daemon of a node. `space`: its network namespace, empty where it has none of its own."""

    def __init__(self, directory: Path, space: str, **options: str) -> None:
        super().__init__(directory, **options)
        self._space = space

    def command(self) -> list[str]:
        """The command line."""
        enter = ["ip", "netns", "exec", self._space] if self._space else []
        return [*enter, *super().command()]


@contextmanager
def two_nodes(
    directory: Path, *, may_have_spaces: bool = False, **options: str
) -> Iterator[tuple[PeerDaemon, PeerDaemon]]:
    """Two daemons with the same options, which have found each other. Chunks come over the stream, as between two hosts, where
    no option says otherwise."""
    options = {"peer.shm": "false", **options}
    with ExitStack() as stack:
        has_spaces = may_have_spaces and os.geteuid() == 0 and shutil.which("ip") is not None
        spaces = stack.enter_context(_joined_spaces()) if has_spaces else ["", ""]
        settings = _settings_with_keys(directory) if has_spaces else _settings_of_loopback()
        daemons: list[PeerDaemon] = []
        for name, space, own in zip(NAMES, spaces, settings, strict=True):
            (directory / name).mkdir()
            daemon = PeerDaemon(directory / name, space, **{"peer.name": name, **own, **options})
            stack.enter_context(daemon)
            daemons.append(daemon)
        wait_until(lambda: all(map(_follows_one, daemons)), "the nodes follow each other")
        yield daemons[0], daemons[1]
        if all(daemon.is_running for daemon in daemons):
            assert_converged(*daemons)


def wait_known(daemon: Daemon, chunks: int) -> None:
    """Until a daemon knows that its peer has so many chunks at least."""
    wait_until(lambda: int(daemon.stats()["peer.known_chunks"]) >= chunks, f"{chunks} chunks of the peer are known")


def assert_converged(*daemons: Daemon) -> None:
    """At rest, each of two daemons knows exactly the chunks that the other one has: as many, and each of them."""
    for owner, here in permutations(daemons, 2):
        keys = _keys_of(owner)
        wait_until(
            lambda: _known_of(here, owner.node) == len(keys),  # noqa: B023 - used at once
            f"{here.node} knows the {len(keys)} chunks of {owner.node}",
        )
        hello = m.Hello(m.MAGIC, versions.NEWEST, m.ROLE_ENGINE, "test-model", SMALL.to_wire(), versions.OLDEST)
        with closing(BlockingConnection(here.socket, hello, 5.0)) as connection:
            mapping = Mapping.attach(connection.fds[2], connection.welcome.remote_bytes, writable=False)
            view = RemoteView(mapping)
            unknown = [key.hex()[:16] for key in keys if not view.has(key)]
        assert not unknown, (
            f"{here.node} does not know {len(unknown)} of {len(keys)} chunks of {owner.node}: {unknown[:5]}"
        )


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with ports that are free now."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def pulled_chunks(daemon: Daemon) -> int:
    """Chunks that a daemon has pulled from its peer."""
    return int(daemon.stats()["peer.pulled_chunks"])


def _keys_of(daemon: Daemon) -> list[bytes]:
    """The chunks that a daemon has in any of its tiers, without those that only engines have."""
    keys: set[bytes] = set()
    cursor = 0
    with daemon.admin() as admin:
        while cursor >= 0:
            page = admin.snapshot(cursor)
            keys |= {chunk.key for chunk in unpack_chunks(page.chunks) if chunk.tiers & NODE_TIERS}
            cursor = page.cursor
    return sorted(keys)


def _known_of(daemon: Daemon, node: str) -> int:
    """How many chunks of a node a daemon knows. None of one that it does not follow."""
    with daemon.admin() as admin:
        return sum(row["known_chunks"] for row in admin.peers()["peers"] if row["node"] == node)


def _follows_one(daemon: Daemon) -> bool:
    return int(daemon.stats()["peer.followed.followed"]) == 1


@contextmanager
def _joined_spaces() -> Iterator[list[str]]:
    spaces = [f"kvpool-{os.getpid()}-{name}" for name in NAMES]
    with ExitStack() as stack:
        for space in spaces:
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "delete", space)
        _ip("-n", spaces[0], "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", spaces[1])
        for space, address in zip(spaces, ADDRESSES, strict=True):
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "veth")
            _ip("-n", space, "link", "set", "veth", "up")
        yield spaces


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)


def _settings_with_keys(directory: Path) -> list[dict[str, str]]:
    pairs = [make_key_pair() for _ in NAMES]
    allow = directory / "allow"
    allow.write_text("".join(f"{pair.public.decode()}\n" for pair in pairs))
    members = ", ".join(
        f"{address}:{CONTROL_PORT} {pair.public.decode()}" for address, pair in zip(ADDRESSES, pairs, strict=True)
    )
    settings = []
    for name, address, pair in zip(NAMES, ADDRESSES, pairs, strict=True):
        write_key_file(str(directory / f"{name}.key"), pair)
        settings.append(
            {
                "peer.listen": f"tcp://{address}:{CONTROL_PORT}",
                "peer.stream": f"tcp://{address}:{STREAM_PORT}",
                "peer.members": members,
                "peer.keys": str(directory / f"{name}.key"),
                "peer.allow": str(allow),
            }
        )
    return settings


def _settings_of_loopback() -> list[dict[str, str]]:
    addresses = free_addresses(len(NAMES))
    stream = {"peer.stream": "tcp://127.0.0.1:0", "peer.members": ", ".join(addresses)}
    return [{"peer.listen": f"tcp://{address}", **stream} for address in addresses]
