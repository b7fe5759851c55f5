"""Tag of this host: equal for all daemons under one kernel, whatever containers they are in. Any thread.

Made of the kernel's boot id, which it does not reveal. It only says who may try: equal tags prove nothing, since a virtual
machine that was copied has the boot id of the other one.
"""

import hashlib
from pathlib import Path

from kvpool.peers.control.records import HOST_BYTES

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def host_tag(path: str = BOOT_ID) -> bytes | None:
    """The tag; None where the kernel does not give its boot id."""
    try:
        boot_id = Path(path).read_bytes().strip()
    except OSError:
        return None
    return hashlib.blake2b(boot_id, digest_size=HOST_BYTES, person=b"kvpool host").digest() if boot_id else None
