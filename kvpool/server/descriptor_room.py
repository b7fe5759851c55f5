"""Limit of file descriptors, and the number of connections that fit it. Main thread, at the start.

Other nodes have a part of their own, beside which engines and operators have all of theirs, whatever the others do.
"""

import resource
from dataclasses import dataclass

from kvpool.config.config import Config
from kvpool.errors import ConfigError
from kvpool.pool.lower_tiers import plan_tiers

# Descriptors of the daemon itself: memory, sockets, pipes, logs, its catalogue, connections of HTTP. A running one has
# 30 to 60, and three more for each daemon of its host whose memory it has mapped.
OWN_DESCRIPTORS = 192
CONNECTIONS_MIN = 8
# Of what segment files leave, for other nodes where there is not enough for all.
PEER_PART = 0.25
# Each connection of the control plane has a duplicate of its descriptor (`connection_guard`).
_DESCRIPTORS_OF_CONTROL = 2


@dataclass(frozen=True, slots=True)
class PeerRoom:
    """Connections of other nodes at most. `control`: to the control plane, after their Hello; `control_strangers`: before it;
    `accepted_at_once`: before the first look at them; `streams`: to the stream listener, with a ticket;
    `stream_strangers`: without."""

    control: int = 1024
    control_strangers: int = 128
    accepted_at_once: int = 512
    streams: int = 256
    stream_strangers: int = 64

    @property
    def descriptors(self) -> int:
        """What they take."""
        control = self.control + self.control_strangers + self.accepted_at_once
        return _DESCRIPTORS_OF_CONTROL * control + self.streams + self.stream_strangers

    def within(self, descriptors: int) -> "PeerRoom":
        """As much of each as fits, and a few in any case."""
        part = min(1.0, max(0, descriptors) / self.descriptors)
        return PeerRoom(
            control=max(16, int(part * self.control)),
            control_strangers=max(8, int(part * self.control_strangers)),
            accepted_at_once=max(8, int(part * self.accepted_at_once)),
            streams=max(16, int(part * self.streams)),
            stream_strangers=max(8, int(part * self.stream_strangers)),
        )


@dataclass(frozen=True, slots=True)
class DescriptorRoom:
    """Connections that fit: of engines and operators, and of other nodes. `shortage`: why these are fewer than configured."""

    connections: int
    peers: PeerRoom
    shortage: str = ""


def descriptor_limit() -> int:
    """As far as the process's limit may be raised."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def raise_limit() -> int:
    """Raise the process's limit as far as it may be raised; the limit then."""
    hard = descriptor_limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def plan_descriptors(config: Config, limit: int) -> DescriptorRoom:
    """`server.max_connections`, or as many as fit the limit beside the segment files and other nodes.

    Raises ConfigError where only a few fit.
    """
    plans = plan_tiers(config)
    segments = plans.descriptors
    part = max(0, int(PEER_PART * (limit - OWN_DESCRIPTORS - segments)))
    peers, routers = PeerRoom().within(part), min(config.events.descriptors, part)
    taken = OWN_DESCRIPTORS + segments + routers + (peers.descriptors if config.peer.is_used else 0)
    each = 2 if config.server.staging_bytes else 1
    wanted = config.server.max_connections
    needed = taken + each * wanted
    if needed <= limit:
        return DescriptorRoom(wanted, peers)
    fitting = (limit - taken) // each
    others = f" and {peers.descriptors} for other nodes" if config.peer.is_used else ""
    others += f" and {routers} for routers" if routers else ""
    what = (
        f"server.max_connections is {wanted}, which takes {needed} file descriptors with {segments} segment files{others}, "
        f"and the process may have {limit} (LimitNOFILE= of the unit, ulimit -n)"
    )
    if fitting < min(CONNECTIONS_MIN, wanted):
        raise ConfigError(
            [
                f"{what}: {', or '.join(['raise the limit', *filter(None, (plan.descriptors_option for plan in plans.all))])}"
            ]
        )
    remedy = "raise the limit, or lower server.max_connections"
    return DescriptorRoom(fitting, peers, f"{what}: {fitting} connections are served at a time; {remedy}")
