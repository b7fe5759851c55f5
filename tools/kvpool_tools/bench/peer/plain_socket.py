"""Plain sockets: the floor of `bench peer`, without marks or checksums.

Each connection is made within the call, and sends its share of the bytes from the source's memory into the target's.
"""

import socket
import struct
from threading import Thread

from kvpool_tools.bench.peer.node import HOST, LONG_S

# Of one system call.
PIECE_BYTES = 1 << 20
_TIMEOUT = struct.pack("ll", int(LONG_S), 0)


def send_plain(source: memoryview, target: memoryview, *, size: int, streams: int) -> None:
    """Send so many bytes over so many connections."""
    share = size // streams
    threads = []
    with socket.create_server((HOST, 0)) as listener:
        for number in range(streams):
            receiver = socket.create_connection(listener.getsockname())
            sender, _ = listener.accept()
            # Of the kernel: Python's own would add a system call to each.
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT)
            part = slice(number * share, (number + 1) * share)
            threads.append(Thread(target=_send, args=(sender, source[part])))
            threads.append(Thread(target=_receive, args=(receiver, target[part])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(connection: socket.socket, source: memoryview) -> None:
    with connection:
        for at in range(0, len(source), PIECE_BYTES):
            connection.sendall(source[at : at + PIECE_BYTES])


def _receive(connection: socket.socket, target: memoryview) -> None:
    with connection:
        at = 0
        while at < len(target):
            count = connection.recv_into(target[at : at + PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                return
            at += count
