"""Members by a DNS name: every address of a headless service is a node.

Names are resolved by the system's resolver, which has no deadline: the watch has one. An answer without addresses is a failed
look, and the last known members stay: a link to a node that has gone costs little, and a broken DNS gives an empty answer.

The name has no keys: all nodes behind it share one key pair. Threads: see `member_watch.py`.
"""

import socket
from collections.abc import Callable

from kvpool.clock import Clock
from kvpool.config.addresses import PORT_MAX
from kvpool.errors import InvalidArgument
from kvpool.peers.back_off import Uniform
from kvpool.peers.members.member import BookSettings, Member, MemberBook, MembersUnavailable, OnChange, endpoint_of
from kvpool.peers.members.member_watch import MemberWatch, WatchSettings

NAME_BYTES_MAX = 253
Resolve = Callable[[str], list[str]]


def system_addresses(name: str) -> list[str]:
    """All addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def parse_dns(text: str) -> tuple[str, int]:
    """Name and port of `dns:NAME:PORT`. Raises InvalidArgument."""
    scheme, _, rest = text.partition(":")
    name, _, port = rest.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX
    is_name = 0 < len(name) <= NAME_BYTES_MAX and all(
        part.isalnum() for part in name.replace("-", "a").replace("_", "a").split(".")
    )
    if scheme != "dns" or not is_port or not name.isascii() or not is_name:
        raise InvalidArgument(f"{text!r} is no source of members, expected dns:NAME:PORT")
    return name, int(port)


class DnsMembers(MemberWatch):
    """See the module."""

    def __init__(
        self,
        text: str,
        on_change: OnChange,
        *,
        book: BookSettings,
        watch: WatchSettings,
        clock: Clock,
        random: Uniform,
        resolve: Resolve = system_addresses,
    ) -> None:
        """`text`: `dns:NAME:PORT`. Raises InvalidArgument."""
        self._host, self._port = parse_dns(text)
        self._resolve = resolve
        super().__init__(text, self._addresses, MemberBook(on_change, book, clock), settings=watch, random=random)

    def _addresses(self) -> list[Member]:
        try:
            found = self._resolve(self._host)
        except (OSError, UnicodeError) as error:
            raise MembersUnavailable(f"{self._host} cannot be resolved: {error}") from error
        usable = [host for host in found if "%" not in host]  # no scopes of link-local addresses
        if not usable:
            raise MembersUnavailable(f"{self._host} has no address")
        try:
            return [Member(endpoint_of(host, self._port)) for host in usable]
        except InvalidArgument as error:
            raise MembersUnavailable(f"{self._host} has an address that is none: {error}") from error
