"""Name of an engine's connection, by which operators find it: engine, host or pod, and rank.

The kernel's process id says nothing where daemon and engine have process namespaces of their own. Any thread.
"""

import os
import socket

from kvpool.protocol.records.messages import CONNECTION_NAME_BYTES_MAX

# The pod of a container, where its manifest passes it on, and the host, which in a pod has the pod's name.
_PLACES = ("POD_NAME", "HOSTNAME")


def connection_name(engine: str, rank: int | None, world: int) -> str:
    """`engine place rank 3 of 8`: without the rank where there is one alone; `scheduler` for None. At most
    CONNECTION_NAME_BYTES_MAX bytes; a longer place is cut."""
    place = next((value for variable in _PLACES if (value := os.environ.get(variable))), "") or socket.gethostname()
    role = "" if world == 1 and rank is not None else " scheduler" if rank is None else f" rank {rank} of {world}"
    room = CONNECTION_NAME_BYTES_MAX - len(f"{engine} {role}".encode())
    return f"{engine} {place.encode(errors='replace')[:room].decode(errors='ignore')}{role}"
