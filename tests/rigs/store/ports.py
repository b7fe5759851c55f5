"""Ports of this machine for tests' own servers."""

import socket


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def is_listening(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as one:
        one.settimeout(1.0)
        return one.connect_ex((host, port)) == 0
