"""Peer list: what an operator is shown of each known member, and the request for it. Control thread only; nothing waits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvpool.config.config import Config
from kvpool.errors import InvalidArgument
from kvpool.index.remote_chunks import NodeName
from kvpool.peers.circuit_breaker import BreakerState
from kvpool.peers.link_state import REFUSED, LinkState
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import peers as pm
from kvpool.protocol.verbs import OPERATOR, verb
from kvpool.tiers.peer.node_records import NodeRecord

if TYPE_CHECKING:  # links and followers load ZMQ, which a node without peers does without
    from kvpool.peers.control.link import PeerLink
    from kvpool.peers.following.followers import Followers

# A row has 15 names and values: a hundred rows fit the items of a frame (`frames.ITEMS_MAX`).
ROWS_MAX = 100
TEXT_CHARACTERS_MAX = 500


class PeerLister(Protocol):
    """A fleet, as far as it is listed."""

    def here(self) -> dict[str, Any]:
        """What an operator is shown of this node among the others."""
        ...

    def fleet_problems(self) -> list[str]:
        """What is wrong with the fleet as this node sees it, in a line each."""
        ...

    def peer_links(self) -> "list[PeerLink]":
        """The link to each known member."""
        ...

    def former_links(self) -> "list[PeerLink]":
        """The closed links to members that have left a while ago at most."""
        ...

    def peer_row(self, link: "PeerLink") -> dict[str, Any]:
        """What an operator is shown of a member."""
        ...


class ReloadedFleet(PeerLister, Protocol):
    """A fleet that new readings of the configuration reach."""

    def read_allowed(self, config: Config) -> frozenset[bytes] | None:
        """The public keys of the nodes that may connect, by a reading of the configuration; None: no keys are used."""
        ...

    def admit(self, allowed: frozenset[bytes]) -> str:
        """Admit nodes with these keys alone, from now on. What that changes, in words; empty for nothing."""
        ...


class PeerVerbs:
    """The requests about other nodes. `fleets`: none where this node has no peers."""

    def __init__(self, fleets: Sequence[PeerLister]) -> None:
        self._fleets = fleets

    @verb(pm.AskPeers, roles=OPERATOR)
    def list_peers(self, request: pm.AskPeers) -> m.Report:
        """List a page of the known members and those that have left, and what is known of each."""
        if request.first < 0:
            raise InvalidArgument(f"first is {request.first}, expected 0 or more")
        found = _ordered(self._fleets, has_former=True)
        page = found[request.first : request.first + ROWS_MAX]
        heres = [fleet.here() for fleet in self._fleets]
        return m.Report(
            {
                "here": heres[0] if heres else None,
                "problems": [line[:TEXT_CHARACTERS_MAX] for fleet in self._fleets for line in fleet.fleet_problems()],
                "members": sum(link.state is not LinkState.CLOSED for _, link in found),
                "peers": [fleet.peer_row(link) for fleet, link in page],
            }
        )


def peer_rows(fleets: Sequence[PeerLister]) -> tuple[dict[str, Any], ...]:
    """The rows of all members, in the order of their addresses."""
    return tuple(fleet.peer_row(link) for fleet, link in _ordered(fleets, has_former=False))


def name_of(link: "PeerLink") -> NodeName:
    """The name of a member: the one that it has shown last, or else the one that its source reports; it may be empty."""
    return NodeName(link.last_life.node if link.last_life is not None else link.member.node)


def _ordered(fleets: Sequence[PeerLister], *, has_former: bool) -> "list[tuple[PeerLister, PeerLink]]":
    found = [(fleet, link) for fleet in fleets for link in fleet.peer_links()]
    if has_former:
        found += [(fleet, link) for fleet in fleets for link in fleet.former_links()]
    return sorted(found, key=lambda one: one[1].member.endpoint)


def describe(link: "PeerLink", followers: "Followers", record: NodeRecord | None) -> dict[str, Any]:
    """The row of one member. `record`: of pulls from it, None before the first.

    `state`: following | snapshot | waiting (until the next attempt to follow it) | refused | suspended | deferred (asked after
    others) | connecting | away | left (no member any more). `retry_s`: how long it stays suspended or deferred.
    """
    name = name_of(link)
    state = _state_of(link, followers, name, record)
    code = link.fault.removeprefix(REFUSED).partition(":")[0] if state == "refused" else ""
    fault = link.fault or followers.fault_of(name) or ("" if record is None else record.last_error)
    return {
        "node": name,
        "address": link.member.endpoint,
        "state": state,
        "code": code,
        "retry_s": 0.0 if record is None else round(record.breaker.retry_s or record.deferred_s, 3),
        "life": (link.last_life or link.member).incarnation.hex(),
        "away_s": None if (away_s := link.away_s) is None else round(away_s, 3),
        "known_chunks": followers.known_of(name),
        "pulls": 0 if record is None else record.pulls,
        "failures": 0 if record is None else record.failures,
        "read_bytes": 0 if record is None else record.read_bytes,
        "bytes_per_s": None if record is None or not record.read_bytes else round(record.pace.bytes_per_s),
        "latency_us": None if record is None or not record.pace.answers else round(record.pace.wait_s * 1e6),
        "ping_us": round(link.rtt_s * 1e6),
        "last_error": fault[:TEXT_CHARACTERS_MAX],
    }


def _state_of(link: "PeerLink", followers: "Followers", name: NodeName, record: NodeRecord | None) -> str:
    if link.state is LinkState.CLOSED:
        return "left"
    if link.life is None:
        if link.fault.startswith(REFUSED):
            return "refused"
        return "away" if link.fault else "connecting"
    if record is not None and record.breaker.state is not BreakerState.CLOSED and record.breaker.retry_s > 0:
        return "suspended"
    if followers.fault_of(name) and not followers.is_current(name):
        return "waiting"
    if not followers.is_current(name):
        return "snapshot"
    return "deferred" if record is not None and record.deferred_s else "following"
