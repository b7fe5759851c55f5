"""Members: the nodes of a fleet as this node knows them, and the interface of what finds them.

A member is known by its endpoint, or where its source reports nodes (etcd) by the node's name. `MemberBook` is the truth
behind each source: a new list replaces the known one and reports the difference. The node itself is no member; neither is one
whose key is not allowed, whoever lists it. A member that is not listed stays for `linger_s`, so that one that comes and goes
keeps its link. There are never more than `members_max`: known ones come first, further ones are left out and counted.

Values; the book is of one thread, that of its source.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from zmq.utils import z85

from kvpool.clock import Clock, Deadline
from kvpool.config.addresses import parse_zmq
from kvpool.config.curve_keys import is_key
from kvpool.errors import InvalidArgument, KVPoolError

_LISTED = (
    "IP:PORT such as 192.0.2.12:9470, and after a space the node's public key; commas separate nodes "
    "(found otherwise: dns:NAME:PORT, etcd:URL)"
)


# Members that a message names.
_SHOWN = 3


class MembersUnavailable(KVPoolError):
    """The source of members did not answer, or with something else."""


@dataclass(frozen=True, slots=True)
class Member:
    """Another node. `public_key`: 40 characters; empty: the fleet has one key pair, this node's. `node` and `incarnation` are
    empty where only the node's own Hello reports them."""

    endpoint: str
    public_key: bytes = b""
    node: str = ""
    incarnation: bytes = b""

    @property
    def identity(self) -> str:
        """What stays the same when a node begins a new life."""
        return self.node or self.endpoint


@dataclass(frozen=True, slots=True)
class MembersChange:
    """A difference. `renewed`: known nodes that have another endpoint, key or incarnation now."""

    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    renewed: tuple[Member, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.renewed)


OnChange = Callable[[MembersChange], None]


class Members(Protocol):
    """A source of members. `on_change` is called on a thread of the source's, never on two at a time; it must not wait."""

    def start(self) -> None:
        """Begin: the first change reports all members that are known."""
        ...

    def stop(self) -> None:
        """End, within a bounded time. Afterwards `on_change` is not called."""
        ...

    def current(self) -> tuple[Member, ...]:
        """The members known now. Any thread."""
        ...

    def problem(self) -> str:
        """Why the members may be out of date, in a line; empty where they are not. Any thread."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters, by name. Any thread."""
        ...

    def admit(self, allowed: frozenset[bytes]) -> None:
        """Have members with these keys alone, from now on. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class BookSettings:
    """`own`: names and endpoints of this node. `allowed`: public keys, 32 bytes each; None: no keys are used. A member that is
    no longer listed stays for `linger_s`, or where the source was away a moment ago until `return_s` after that."""

    own: frozenset[str] = frozenset()
    allowed: frozenset[bytes] | None = None
    members_max: int = 1024
    linger_s: float = 10.0
    return_s: float = 45.0  # the longest time between two looks of a member after failures, and a look

    def __post_init__(self) -> None:
        assert self.members_max > 0
        assert self.linger_s >= 0


class MemberBook:
    """See the module. Of the latest list: `left_out`, how many are beyond the bound; `refused`, endpoints of those whose key is
    not allowed.

    Invariant: `_missing` has the members that the latest list lacks, with the end of their time; none after `note_return`.
    """

    def __init__(self, on_change: OnChange, settings: BookSettings, clock: Clock) -> None:
        self._on_change = on_change
        self._settings = settings
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._missing: dict[str, Deadline] = {}
        self._allowed = settings.allowed
        self._returning: Deadline | None = None
        self.left_out = 0
        self.refused: tuple[str, ...] = ()
        self.changes = 0

    def current(self) -> tuple[Member, ...]:
        """The members known now. Any thread."""
        return tuple(self._members.values())

    def admit(self, allowed: frozenset[bytes]) -> None:
        """With the next list, members with other keys are none, even for a while. Any thread."""
        self._allowed = allowed

    def note_return(self) -> None:
        """The source was away, and may have forgotten members, which need their time to be listed again."""
        self._returning = Deadline(self._settings.return_s, self._clock)
        self._missing = {}  # their time passed while nobody could be listed

    def replace(self, members: Iterable[Member]) -> None:
        """Know these members and no others, and report the difference. Of one identity the last one counts."""
        others = [one for one in members if not self._settings.own & {one.endpoint, one.node}]
        listed = {one.identity: one for one in others if self._is_allowed(one)}
        self.refused = tuple(one.endpoint for one in others if not self._is_allowed(one))
        known = {**self._lingering(listed), **listed}
        kept = sorted(known, key=lambda identity: (identity not in self._members, identity))[
            : self._settings.members_max
        ]
        self.left_out = len(known) - len(kept)
        former, self._members = self._members, {identity: known[identity] for identity in sorted(kept)}
        self._missing = {identity: end for identity, end in self._missing.items() if identity in self._members}
        change = MembersChange(
            joined=tuple(one for identity, one in self._members.items() if identity not in former),
            left=tuple(one for identity, one in former.items() if identity not in self._members),
            renewed=tuple(one for identity, one in self._members.items() if former.get(identity, one) != one),
        )
        if change:
            self.changes += 1
            self._on_change(change)

    def problem(self) -> str:
        """Which members cannot be used, in a line; empty where all can. Any thread."""
        refused, left_out = self.refused, self.left_out
        if refused:
            shown = ", ".join(one.removeprefix("tcp://") for one in refused[:_SHOWN])
            more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            return f"peers: the key of {shown}{more} is not in peer.allow: not connected"
        return f"peers: {left_out} members are too many, {self._settings.members_max} are connected" if left_out else ""

    def stats(self) -> dict[str, int]:
        """Counters, by name. Any thread."""
        return {
            "members": len(self._members),
            "changes": self.changes,
            "left_out": self.left_out,
            "refused": len(self.refused),
        }

    def verify(self) -> None:
        """Assert the invariants."""
        assert self._missing.keys() <= self._members.keys()
        assert len(self._members) <= self._settings.members_max
        assert not self._settings.own & {one.node for one in self._members.values()}

    def _lingering(self, listed: dict[str, Member]) -> dict[str, Member]:
        """The known members that are not listed, and not for so long that they have left."""
        missing = {
            identity: one for identity, one in self._members.items() if identity not in listed and self._is_allowed(one)
        }
        returning_s = 0.0 if self._returning is None else self._returning.remaining_s()
        linger_s = max(self._settings.linger_s, returning_s)
        self._missing = {
            identity: self._missing.get(identity) or Deadline(linger_s, self._clock) for identity in missing
        }
        return {identity: one for identity, one in missing.items() if not self._missing[identity].has_passed()}

    def _is_allowed(self, member: Member) -> bool:
        allowed = self._allowed
        return allowed is None or not member.public_key or z85.decode(member.public_key) in allowed


def endpoint_of(host: str, port: int) -> str:
    """The endpoint of an address and a port. Raises InvalidArgument for what is none."""
    return checked_endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")


def checked_endpoint(text: str) -> str:
    """An endpoint in its one spelling. Raises InvalidArgument unless it is `tcp://IP:PORT` that can be connected to."""
    try:
        address = parse_zmq(text) if text.startswith("tcp://") else None
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is no address of a node, expected tcp://IP:PORT") from error
    if address is None or address.endpoint.endswith(":0"):
        raise InvalidArgument(f"{text!r} is no address of a node, expected tcp://IP:PORT")
    return address.endpoint


def parse_member(text: str) -> Member:
    """A member of a static list: `IP:PORT` or `tcp://IP:PORT`, and after a space its public key. Raises InvalidArgument."""
    address, *keys = text.split() or [""]
    try:
        endpoint = checked_endpoint(address if "://" in address else f"tcp://{address}")
    except InvalidArgument as error:
        raise InvalidArgument(f"{address!r} is no address of a node, expected {_LISTED}") from error
    public_key = " ".join(keys).encode()
    if public_key and not is_key(public_key):
        raise InvalidArgument(
            f"{address!r} is followed by what is no public key of 40 characters (Z85); commas separate nodes"
        )
    return Member(endpoint, public_key)


def parse_members(text: str) -> tuple[list[Member], list[str]]:
    """The members of a list separated by commas, and its faults, a line for each. One comma at the end is no fault."""
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) > 1 and not entries[-1]:
        entries.pop()
    found: dict[str, Member] = {}
    faults = []
    for number, entry in enumerate(entries, 1):
        try:
            member = parse_member(entry)
        except InvalidArgument as error:
            faults.append(f"entry {number}: {error}" if entry else f"entry {number} is empty, expected {_LISTED}")
            continue
        if found.setdefault(member.endpoint, member) is not member:
            faults.append(
                f"entry {number}: {member.endpoint.removeprefix('tcp://')} is listed twice, expected each node once"
            )
    return list(found.values()), faults
