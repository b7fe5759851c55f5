"""Free TCP ports for servers of tests: below those that the kernel gives to outgoing connections, one of which may take a port
between the look and its use. Processes begin at places of their own, and give no port twice.
"""

import itertools
import random
import socket

FIRST, COUNT = 20_000, 12_000
_next = itertools.count(random.SystemRandom().randrange(COUNT))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of an address of this host that nobody listens on now."""
    for number in itertools.islice(_next, COUNT):
        port = FIRST + number % COUNT
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            try:
                one.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
