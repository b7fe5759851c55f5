"""etcd's gateway: the few calls that members need, as JSON over HTTP (etcd 3.4 and later).

Each call has one deadline, for the last byte of headers and content: a server that sends a byte now and then does not stretch
it. (The system's resolver, for a server's name, has none: see `member_watch`.) There is no retry and no redirect, and at most
ANSWER_BYTES_MAX are read of an answer. With several servers the next one is asked after one has failed. All that is wrong is
MembersUnavailable. One thread at a time.
"""

import base64
import http.client
import io
import json
import socket
from http import HTTPStatus
from typing import Any, NamedTuple

import urllib3

from kvpool.clock import Deadline
from kvpool.peers.members.etcd_address import SERVERS_MAX, EtcdTls
from kvpool.peers.members.member import MembersUnavailable

ANSWER_BYTES_MAX = 8 << 20


class EtcdEntry(NamedTuple):
    """One key and its value."""

    key: bytes
    value: bytes


class EtcdRange(NamedTuple):
    """The entries read, how many there are in all, and etcd's revision then."""

    entries: list[EtcdEntry]
    total: int
    revision: int


class EtcdGateway:
    """See the module."""

    def __init__(self, servers: tuple[str, ...], tls: EtcdTls, *, timeout_s: float) -> None:
        self._servers = servers
        self._at = 0
        self._timeout_s = timeout_s
        self._http = urllib3.PoolManager(
            num_pools=SERVERS_MAX,
            maxsize=1,
            retries=False,
            ca_certs=tls.ca_file or None,
            cert_file=tls.cert_file or None,
            key_file=tls.key_file or None,
        )
        self._http.pool_classes_by_scheme = {"http": _PlainPool, "https": _TlsPool}

    def grant(self, ttl_s: int) -> int:
        """A new lease."""
        return _number(self._call("lease/grant", {"TTL": ttl_s}), "ID")

    def keep_alive(self, lease: int) -> bool:
        """Whether the lease still existed; then it begins its time again."""
        result = self._call("lease/keepalive", {"ID": str(lease)}).get("result", {})
        # Of a lease that has ended there is no TTL, or a status of its own, depending on etcd's version.
        return isinstance(result, dict) and _number(result, "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End a lease, and the keys with it."""
        self._call("lease/revoke", {"ID": str(lease)})

    def put(self, key: bytes, value: bytes, lease: int) -> None:
        """Write a key that ends with the lease."""
        self._call("kv/put", {"key": _text(key), "value": _text(value), "lease": str(lease)})

    def read(self, prefix: bytes, *, limit: int, changed_since: int = 0) -> EtcdRange:
        """Entries of a prefix, at most `limit`; only those changed in revision `changed_since` or later."""
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        asked = {"key": _text(prefix), "range_end": _text(end), "limit": str(limit)}
        answer = self._call("kv/range", {**asked, "min_mod_revision": str(changed_since)} if changed_since else asked)
        listed = answer.get("kvs", [])
        if not isinstance(listed, list):
            raise MembersUnavailable("etcd answered with something else than a list")
        header = answer.get("header")
        if not isinstance(header, dict) or "revision" not in header:
            raise MembersUnavailable("etcd answered without its revision")
        revision = _number(header, "revision")
        return EtcdRange([_entry(one) for one in listed[:limit]], _number(answer, "count"), revision)

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        server = self._servers[self._at % len(self._servers)]
        try:
            return self._ask(f"{server}/v3/{name}", json.dumps(body).encode())
        except (urllib3.exceptions.HTTPError, OSError, MembersUnavailable) as error:
            self._at += 1
            raise MembersUnavailable(f"{server}: {error}") from error

    def _ask(self, url: str, body: bytes) -> dict[str, Any]:
        deadline, text = Deadline(self._timeout_s), b""
        headers = {"Content-Type": "application/json"}
        timeout = urllib3.Timeout(total=self._timeout_s)
        try:
            answer = self._http.request(
                "POST", url, body=body, headers=headers, timeout=timeout, redirect=False, preload_content=False
            )
            try:
                while len(text) <= ANSWER_BYTES_MAX and (piece := answer.read1(1 << 16)):
                    text += piece
            finally:
                # A whole answer leaves the connection open for the next call.
                answer.close() if len(text) > ANSWER_BYTES_MAX or deadline.has_passed() else answer.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise MembersUnavailable(_fault_of(error, self._timeout_s)) from error
        if len(text) > ANSWER_BYTES_MAX:
            raise MembersUnavailable(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        if answer.status == HTTPStatus.NOT_FOUND:
            return {}  # there is no such lease
        if answer.status != HTTPStatus.OK:
            raise MembersUnavailable(f"status {answer.status}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MembersUnavailable("an answer that is no JSON") from error
        if not isinstance(found, dict):
            raise MembersUnavailable("an answer that is no JSON object")
        return found


class _TimedReads(io.RawIOBase):
    """Bytes of a socket, until the time is over that it has for one of them when this is made."""

    def __init__(self, source: socket.socket, raw: io.RawIOBase) -> None:
        self._socket = source
        self._raw = raw
        self._deadline = Deadline(source.gettimeout() or 0.0)

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: "memoryview[int]") -> int | None:  # type: ignore[override]
        """See RawIOBase. Raises TimeoutError."""
        if not (remaining_s := self._deadline.remaining_s()):
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Close the socket's file."""
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response all of which has to come within one time: by itself a socket has that time for each piece."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_TimedReads(sock, self.fp.detach()))


class _PlainConnection(urllib3.connection.HTTPConnection):
    response_class = _TimedResponse


class _TlsConnection(urllib3.connection.HTTPSConnection):
    response_class = _TimedResponse


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _fault_of(error: urllib3.exceptions.HTTPError, timeout_s: float) -> str:
    """What has failed, without the library's names of its own objects."""
    cause = error.__cause__
    reason = getattr(cause, "strerror", None) or str(cause or error)
    if isinstance(error, urllib3.exceptions.NameResolutionError):
        return f"its name cannot be resolved: {reason}"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return f"it cannot be connected: {reason}"
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return f"no whole answer within {timeout_s:g} s"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return f"the connection has ended: {reason}"
    return f"TLS fails: {reason}" if isinstance(error, urllib3.exceptions.SSLError) else str(error)


def _entry(found: object) -> EtcdEntry:
    if not isinstance(found, dict):
        raise MembersUnavailable("etcd answered with an entry that is none")
    return EtcdEntry(_bytes(found, "key"), _bytes(found, "value"))


def _bytes(found: dict[str, Any], name: str) -> bytes:
    text = found.get(name, "")
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise MembersUnavailable(f"etcd answered with a {name} that is no base64") from error


def _number(found: dict[str, Any], name: str) -> int:
    """A number, which JSON from etcd has as text; 0 where it is left out."""
    value = found.get(name, "0")
    if not isinstance(value, (str, int)) or not str(value).removeprefix("-").isdecimal() or len(str(value)) > 20:
        raise MembersUnavailable(f"etcd answered with a {name} that is no number")
    return int(value)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
