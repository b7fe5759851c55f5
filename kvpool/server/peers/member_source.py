"""Source of members: what `peer.members` names, checked at the start and then made.

    "IP:PORT [KEY], …"     a list          "dns:NAME:PORT"     a DNS name          "etcd:URL[,URL…][/PREFIX]"     etcd

The options are checked before anything of the daemon begins, and when it reads its configuration again. Any thread.
"""

import importlib.util
import math

from kvpool.clock import Clock
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import InvalidArgument
from kvpool.peers.back_off import Uniform
from kvpool.peers.members.dns_members import DnsMembers, parse_dns
from kvpool.peers.members.etcd_address import EtcdTls, parse_etcd
from kvpool.peers.members.member import BookSettings, Member, Members, OnChange, parse_members
from kvpool.peers.members.member_watch import WatchSettings
from kvpool.peers.members.static_members import StaticMembers

# A registration outlives so many looks, each of which renews it: one that fails and one that is late are no end.
_LOOKS_PER_LEASE = 3
_LEASE_S_MIN = 2
LIST, NOWHERE = "list", "nowhere"
# Faults of a list that are shown at once.
_FAULTS_MAX = 10
# A member that is no longer listed stays for so many looks.
_LOOKS_TO_LINGER = 2


def source_faults(config: PeerConfig) -> list[str]:
    """What is wrong with `peer.members`, a line for each fault, without asking anybody."""
    text = config.members
    try:
        if text.startswith("dns:"):
            parse_dns(text)
        elif text.startswith("etcd:"):
            return _etcd_faults(config)
        elif text:
            return [f"peer.members, {fault}" for fault in parse_members(text)[1][:_FAULTS_MAX]]
    except InvalidArgument as error:
        return [f"peer.members: {error}"]  # no password: that fault has no value
    return []


def listed_members(config: PeerConfig) -> list[Member]:
    """The members that `peer.members` lists; none where they come from DNS or etcd. REQUIRES: it has no fault."""
    return parse_members(config.members)[0] if source_of(config) == LIST else []


def make_members(
    config: PeerConfig, own: Member, on_change: OnChange, *, book: BookSettings, clock: Clock, random: Uniform
) -> Members:
    """The source of members, not started yet. `own`: this node as others know it. REQUIRES: `source_faults` found none."""
    text, refresh_s = config.members, config.members_refresh
    watch = WatchSettings(refresh_s=refresh_s)
    if text.startswith("dns:"):
        return DnsMembers(text, on_change, book=book, watch=watch, clock=clock, random=random)
    if not text.startswith("etcd:"):
        return StaticMembers(listed_members(config), on_change, book=book, clock=clock)
    # urllib3 is an extra.
    from kvpool.peers.members.etcd_members import EtcdMembers, EtcdSettings

    tls = EtcdTls(config.etcd_ca, config.etcd_certificate, config.etcd_key)
    lease_s = max(_LEASE_S_MIN, math.ceil(_LOOKS_PER_LEASE * refresh_s))
    return EtcdMembers(
        text,
        own,
        on_change,
        etcd=EtcdSettings(lease_s, tls),
        book=book,
        watch=watch,
        clock=clock,
        random=random,
    )


def source_of(config: PeerConfig) -> str:
    """Where members come from, in a word or as the option has it: `nowhere`, `list`, `dns:…` or `etcd:…`."""
    if not config.members.startswith(("dns:", "etcd:")):
        return LIST if config.members else NOWHERE
    return config.members


def linger_s(config: PeerConfig) -> float:
    """How long a member stays that is no longer listed."""
    return _LOOKS_TO_LINGER * config.members_refresh


def _etcd_faults(config: PeerConfig) -> list[str]:
    faults, servers = [], parse_etcd(config.members).servers
    if importlib.util.find_spec("urllib3") is None:
        faults.append(
            f"peer.members is {config.members!r}, which needs the package urllib3: install it with pip install 'kvpool[etcd]'"
        )
    if not any(server.startswith("https:") for server in servers):
        faults += [
            f"{name} is {value!r}, expected peer.members to name https:// servers: {', '.join(servers)} would not use it"
            for name, value in (("peer.etcd_ca", config.etcd_ca), ("peer.etcd_certificate", config.etcd_certificate))
            if value
        ]
    return faults
