"""Ports of this machine for tests' own servers."""

import socket


def is_listening(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as one:
        one.settimeout(1.0)
        return one.connect_ex((host, port)) == 0
