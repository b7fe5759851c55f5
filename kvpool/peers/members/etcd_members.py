"""Members by etcd: each node registers itself under a prefix, with a lease that it keeps alive.

    PREFIX/NODE = {"node": …, "endpoint": "tcp://IP:PORT", "public_key": …, "incarnation": "hex"}      NODE is percent-encoded

A node that ends revokes its lease, one that dies leaves with its lease. A look renews the lease, registers again where that was
lost, and asks for entries that changed since the last one; only if there are any, or the number of entries is another, it reads
them all. etcd is not trusted: an entry that is no record of a member is counted and left out, and keys have to be allowed
(`MemberBook`). While etcd is away the last known members stay.

If another node is registered under this node's name, at another address, this one reports it and leaves the entry alone until
that has ended. Threads: see
`member_watch.py`.
"""

import json
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from kvpool.clock import Clock
from kvpool.config.curve_keys import is_key
from kvpool.config.peer_options import NAME_BYTES_MAX
from kvpool.errors import InvalidArgument
from kvpool.peers.back_off import Uniform
from kvpool.peers.members.etcd_address import EtcdTls, parse_etcd
from kvpool.peers.members.etcd_gateway import EtcdEntry, EtcdGateway
from kvpool.peers.members.member import BookSettings, Member, MemberBook, MembersUnavailable, OnChange, checked_endpoint
from kvpool.peers.members.member_watch import MemberWatch, WatchSettings

VALUE_BYTES_MAX = 1024
INCARNATION_DIGITS = 32
_FIELDS = {"node", "endpoint", "public_key", "incarnation"}


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`ttl_s`: a node that has died is a member for so long."""

    ttl_s: int = 15
    tls: EtcdTls = field(default_factory=EtcdTls)


def record_of(member: Member) -> bytes:
    """The value under which a member is registered."""
    return json.dumps(
        {
            "node": member.node,
            "endpoint": member.endpoint,
            "public_key": member.public_key.decode(),
            "incarnation": member.incarnation.hex(),
        }
    ).encode()


def member_in(entry: EtcdEntry, prefix: bytes) -> Member | None:
    """The member that an entry registers; None where it is something else."""
    if len(entry.value) > VALUE_BYTES_MAX or not entry.key.startswith(prefix):
        return None
    try:
        found = json.loads(entry.value)
        name = unquote(entry.key[len(prefix) :].decode(), errors="strict")
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(found, dict)
        or found.keys() != _FIELDS
        or not all(isinstance(one, str) for one in found.values())
    ):
        return None
    node, key, incarnation = found["node"], found["public_key"].encode("utf-8", "surrogatepass"), found["incarnation"]
    is_named = node == name and 0 < len(node.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX and node.isprintable()
    if not is_named or (key and not is_key(key)) or len(incarnation) != INCARNATION_DIGITS:
        return None
    try:
        life = bytes.fromhex(incarnation)  # which passes over spaces
        is_whole = 2 * len(life) == INCARNATION_DIGITS
        return Member(checked_endpoint(found["endpoint"]), key, node, life) if is_whole else None
    except ValueError:  # InvalidArgument is one
        return None


class EtcdMembers(MemberWatch):
    """See the module. `garbage`: entries of the latest list that are none."""

    def __init__(
        self,
        text: str,
        own: Member,
        on_change: OnChange,
        *,
        etcd: EtcdSettings,
        book: BookSettings,
        watch: WatchSettings,
        clock: Clock,
        random: Uniform,
    ) -> None:
        """`text`: `etcd:URL`, see `parse_etcd`. `own`: how this node registers itself. Raises InvalidArgument."""
        if not own.node or len(quote(own.node, safe="")) > NAME_BYTES_MAX * 3:
            raise InvalidArgument(f"node name {own.node!r} cannot be registered, expected 1..{NAME_BYTES_MAX} bytes")
        address = parse_etcd(text)
        self._own = own
        self._prefix = address.prefix.encode()
        self._own_key = self._prefix + quote(own.node, safe="").encode()
        self._settings_of_etcd = etcd
        self._limit = 2 * book.members_max
        self._gateway = EtcdGateway(address.servers, etcd.tls, timeout_s=watch.look_s)
        self._lease = 0
        self._revision = 0
        self._count = -1
        self._listed: list[Member] = []
        self._conflict = ""
        self.garbage = 0
        super().__init__(
            text, self._members, MemberBook(on_change, book, clock), settings=watch, random=random, end=self._leave
        )

    def problem(self) -> str:
        """Why the members may be out of date, or this node's registration is none."""
        return super().problem() or self._conflict

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {**super().stats(), "garbage": self.garbage}

    def _members(self) -> list[Member]:
        self._stay_registered()
        changed = self._gateway.read(self._prefix, limit=1, changed_since=self._revision + 1)
        if changed.entries or changed.total != self._count or changed.revision < self._revision:
            self._read_all()
        return self._listed

    def _stay_registered(self) -> None:
        if self._lease and self._gateway.keep_alive(self._lease):
            return
        self._lease = self._gateway.grant(self._settings_of_etcd.ttl_s)
        found = self._gateway.read(self._own_key, limit=1).entries
        other = member_in(found[0], self._prefix) if found and found[0].key == self._own_key else None
        if other is None or other.endpoint == self._own.endpoint:  # nobody, or a former life of this node
            self._gateway.put(self._own_key, record_of(self._own), self._lease)

    def _read_all(self) -> None:
        found = self._gateway.read(self._prefix, limit=self._limit)
        members = [member_in(entry, self._prefix) for entry in found.entries]
        registered = [one for one in members if one is not None]
        self.garbage = len(members) - len(registered)
        own = [one for one in registered if one.node == self._own.node]
        if not own:
            # Somebody has removed or damaged this node's entry: the next look finds it written again.
            self._gateway.put(self._own_key, record_of(self._own), self._lease)
        is_other = bool(own) and own[0].incarnation != self._own.incarnation
        self._conflict = (
            f"peers: another node registers as {self._own.node!r}, at {own[0].endpoint}: rename one of them"
            if is_other
            else ""
        )
        self._listed = registered
        self._revision, self._count = found.revision, found.total

    def _leave(self) -> None:
        try:
            if self._lease:
                self._gateway.revoke(self._lease)
        except MembersUnavailable:
            pass  # the lease ends by itself
        self._gateway.close()
