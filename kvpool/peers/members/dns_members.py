"""Members by a DNS name: every address of a headless service is a node.

Names are resolved by the system's resolver, which has no deadline, on a thread of its own: one that does not return in time is
a failed look, and no other is begun until it has. An answer without addresses is a failed look too, and the last known members
stay: a link to a node that has gone costs little, and an empty answer is what a broken DNS gives.

The name has no keys: all nodes behind it share one key pair. Threads: see `member_watch.py`.
"""

import socket
import threading
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
        self._resolution = _Resolution(resolve)
        self._look_s = watch.look_s
        super().__init__(text, self._addresses, MemberBook(on_change, book, clock), settings=watch, random=random)

    def _addresses(self) -> list[Member]:
        found = self._resolution.addresses(self._host, self._look_s)
        usable = [host for host in found if "%" not in host]  # no scopes of link-local addresses
        if not usable:
            raise MembersUnavailable(f"{self._host} has no address")
        try:
            return [Member(endpoint_of(host, self._port)) for host in usable]
        except InvalidArgument as error:
            raise MembersUnavailable(f"{self._host} has an address that is none: {error}") from error


class _Resolution:
    """One resolution at a time, each with a deadline for its waiter."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._thread: threading.Thread | None = None
        self._found: list[str] = []
        self._fault = ""

    def addresses(self, name: str, timeout_s: float) -> list[str]:
        """The addresses of a name. Raises MembersUnavailable."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(name,), name="kvpool-dns", daemon=True)
            self._thread.start()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise MembersUnavailable(f"{name} was not resolved within {timeout_s:g} s")
        self._thread = None
        if self._fault:
            raise MembersUnavailable(f"{name} cannot be resolved: {self._fault}")
        return self._found

    def _run(self, name: str) -> None:
        self._found, self._fault = [], ""
        try:
            self._found = self._resolve(name)
        except (OSError, UnicodeError) as error:
            self._fault = str(error)
