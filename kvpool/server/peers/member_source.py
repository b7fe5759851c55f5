"""Source of members: what `peer.members` names, checked at the start and then made.

    "IP:PORT [KEY], …"     a list          "dns:NAME:PORT"     a DNS name          "etcd:URL[,URL…][/PREFIX]"     etcd

The options are checked before anything of the daemon begins, so that a wrong one ends it at once with its name. Any thread.
"""

import importlib.util
import math

from kvpool.clock import Clock
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import ConfigError, InvalidArgument
from kvpool.peers.back_off import Uniform
from kvpool.peers.members.dns_members import DnsMembers, parse_dns
from kvpool.peers.members.etcd_address import EtcdTls, parse_etcd
from kvpool.peers.members.member import BookSettings, Member, Members, OnChange, parse_member
from kvpool.peers.members.member_watch import WatchSettings
from kvpool.peers.members.static_members import StaticMembers

# A registration outlives so many looks, each of which renews it: one that fails and one that is late are no end.
_LOOKS_PER_LEASE = 3
_LEASE_S_MIN = 2
# A member that is no longer listed stays for so many looks.
_LOOKS_TO_LINGER = 2


def check_source(config: PeerConfig) -> None:
    """Check `peer.members`, without asking anybody. Raises ConfigError."""
    text = config.members
    try:
        if text.startswith("dns:"):
            parse_dns(text)
        elif text.startswith("etcd:"):
            parse_etcd(text)
        else:
            for entry in _listed(text):
                parse_member(entry)
    except InvalidArgument as error:
        named = "peer.members" if "@" in text else f"peer.members is {text!r}"  # passwords are not repeated
        raise ConfigError([f"{named}: {error}"]) from error
    if text.startswith("etcd:") and importlib.util.find_spec("urllib3") is None:
        raise ConfigError(
            [f"peer.members is {text!r}, which needs the package urllib3: install it with pip install 'kvpool[etcd]'"]
        )


def make_members(
    config: PeerConfig, own: Member, on_change: OnChange, *, book: BookSettings, clock: Clock, random: Uniform
) -> Members:
    """The source of members, not started yet. `own`: this node as others know it. REQUIRES: `check_source` found no fault."""
    text, refresh_s = config.members, config.members_refresh
    watch = WatchSettings(refresh_s=refresh_s)
    if text.startswith("dns:"):
        return DnsMembers(text, on_change, book=book, watch=watch, clock=clock, random=random)
    if not text.startswith("etcd:"):
        return StaticMembers(_listed(text), on_change, book=book, clock=clock)
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
        return "list" if config.members else "nowhere"
    return config.members


def linger_s(config: PeerConfig) -> float:
    """How long a member stays that is no longer listed."""
    return _LOOKS_TO_LINGER * config.members_refresh


def _listed(text: str) -> list[str]:
    return [entry for entry in (one.strip() for one in text.split(",")) if entry]
