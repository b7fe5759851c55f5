"""Trust of a node: its key pair, and the public keys of those that it admits; and all faults of section `peer` that only files,
addresses and the build show.

Read before anything of the daemon begins, and again with each reading of the configuration, so that a fault is named at once
in both. Any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import kvpool_native
from kvpool.config.curve_keys import KeyPair, read_allow_list, read_key_file
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import ConfigError
from kvpool.server.peers.member_source import listed_members, source_faults

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Trust:
    """`keys`: this node's; `allowed`: public keys of the others, 32 bytes each. None: no keys are used."""

    keys: KeyPair | None
    allowed: frozenset[bytes] | None


def read_trust(config: PeerConfig) -> Trust:
    """The trust of a node that has peers. Raises ConfigError with every fault of its options."""
    faults = source_faults(config)
    if config.encrypt and not kvpool_native.tls_library():
        faults.append(
            "peer.encrypt is true, but there is no TLS: this machine has no OpenSSL 3 (Debian's libssl3),"
            " or this build was made without its headers (libssl-dev)"
        )
    keys = _read(lambda: read_key_file("peer.keys", config.keys), faults) if config.keys else None
    allowed = _read(lambda: read_allow_list("peer.allow", config.allow), faults) if config.allow else None
    if not faults:
        faults += _faults_of_listed(config, keys)
    if faults:
        raise ConfigError(faults)
    return Trust(keys, allowed)


def _read(read: Callable[[], Read], faults: list[str]) -> Read | None:
    try:
        return read()
    except ConfigError as error:
        faults += error.faults
        return None


def _faults_of_listed(config: PeerConfig, keys: KeyPair | None) -> list[str]:
    """This node's own address may be listed, if it is listed as it is."""
    faults = []
    for member in listed_members(config):
        address = member.endpoint.removeprefix("tcp://")
        if member.endpoint == str(config.stream):
            faults.append(f"peer.members has {address}, the address of peer.stream here, expected that of peer.listen")
        if member.public_key and keys is None:
            faults.append(f"peer.members has a public key after {address}, expected peer.keys and peer.allow beside it")
        elif keys is not None and member.endpoint == str(config.listen) and member.public_key not in (b"", keys.public):
            faults.append(
                f"peer.members has this node's own address {address} with another public key than that of peer.keys, "
                f"expected {keys.public.decode()}"
            )
    return faults
