"""A flood of the control plane: a process with keys that count, which sends requests as fast as they are taken.

`python -m tests.rigs.nodes.flood ENDPOINT KEY-FILE SERVER-KEY KIND KEYS` floods until it is killed. Its connection is shut down
again and again; then it makes another one.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq

from kvpool.config.curve_keys import read_key_file
from kvpool.peers.control import records as r
from kvpool.peers.control.wire import encode_message
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.nodes.network import CONTROL_PORT, HostedDaemon, Node
from tests.rigs.nodes.peers import identity_of

# Requests between two Hellos: a new connection needs one.
BURST = 100
KINDS = ("ping", "pull", "keys", "nonsense")


def _request(kind: str, number: int, keys: bytes) -> r.Request:
    if kind == "pull":
        return r.Pull(number, "test-model", list(SMALL.to_wire()), b"", 0, keys, 60_000, False)
    if kind == "keys":
        return r.AskKeys(0)
    return r.Ping() if kind == "ping" else r.Hello(b"none", 1, 1, "", b"", "", b"")


def flood(endpoint: str, key_file: str, server_key: str, kind: str, keys: str) -> None:
    """Flood until the end of the process. `keys`: of pulls, in hexadecimal."""
    packed = bytes.fromhex(keys)
    pair = read_key_file("the flood's key file", key_file)
    context = zmq.Context()
    for life in itertools.count(1):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.SNDTIMEO, 500)
        dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
        dealer.curve_serverkey = server_key.encode()
        dealer.connect(endpoint)
        with contextlib.suppress(zmq.ZMQError):
            for sequence in itertools.count(1):
                record = (
                    identity_of("flood", life).hello() if sequence % BURST == 1 else _request(kind, sequence, packed)
                )
                dealer.send(encode_message(record, sequence))
                while dealer.poll(0):
                    dealer.recv()
        dealer.close()


class Flood:
    """A flood of one daemon by a node's host, paused at first."""

    def __init__(self, by: Node, of: HostedDaemon, server_key: bytes, *, kind: str, keys: bytes) -> None:
        root = Path(__file__).parents[3]
        paths = os.pathsep.join([str(root), str(root / "client")])
        endpoint = f"tcp://{of.host.address}:{CONTROL_PORT}"
        command = [sys.executable, "-m", "tests.rigs.nodes.flood", endpoint, str(by.directory / "key")]
        self._process = subprocess.Popen(
            [*by.host.prefix, *command, server_key.decode(), kind, keys.hex()], env={**os.environ, "PYTHONPATH": paths}
        )

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It goes on in this block alone."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop it for now."""
        assert self._process.poll() is None, "the flood has ended"
        self._process.send_signal(signal.SIGSTOP)


def messages_of(daemon: HostedDaemon) -> int:
    """Messages of all peers that a daemon has received."""
    return int(daemon.stats().get("peer.asked.messages", 0))


def wait_flooded(daemon: HostedDaemon, messages: int) -> None:
    """Until a daemon has received so many messages more."""
    first = messages_of(daemon)
    wait_until(lambda: messages_of(daemon) >= first + messages, "the flood has begun")


if __name__ == "__main__":
    flood(*sys.argv[1:])
