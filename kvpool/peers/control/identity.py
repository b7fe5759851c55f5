"""Identity of a node on the control plane: what its Hello says, what it accepts, another node's life. Values; any thread."""

from dataclasses import dataclass

from kvpool.peers.control import records as r
from kvpool.peers.control.wire import WireFault, choose_version


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Name and life of this node. `incarnation`: new with each daemon process. `stream`: its bulk listener's address, empty for
    none. `domain`: the tag of its trust domain (`keys.domain_tag`)."""

    node: str
    incarnation: bytes
    domain: bytes
    stream: str = ""

    def __post_init__(self) -> None:
        assert 0 < len(self.node.encode()) <= r.NAME_BYTES_MAX, "the name of a node has 1 to 256 bytes"
        assert len(self.incarnation) == r.INCARNATION_BYTES
        assert len(self.domain) == r.DOMAIN_TAG_BYTES

    def hello(self, *, oldest: int = r.OLDEST_VERSION, newest: int = r.NEWEST_VERSION) -> r.Hello:
        """The Hello of this node."""
        return r.Hello(r.MAGIC, newest, oldest, self.node, self.incarnation, self.stream, self.domain)

    def accept(self, hello: r.Hello) -> int:
        """The version for a connection with the other node. Raises WireFault."""
        version = choose_version(hello)
        if hello.domain != self.domain:
            raise WireFault(
                r.RefusalCode.DOMAIN,
                "the nodes belong to different trust domains: give both the same server.domain_secret_file",
            )
        if hello.node == self.node:
            raise WireFault(
                r.RefusalCode.SELF, "this node has the same name: it asks itself, or two nodes share a name"
            )
        return version


@dataclass(frozen=True, slots=True)
class PeerLife:
    """A life of the peer's daemon, as its Hello reports it. `is_new`: another one than at the last connection.
    `version`: that both speak."""

    node: str
    incarnation: bytes
    stream: str
    is_new: bool
    version: int = r.OLDEST_VERSION
