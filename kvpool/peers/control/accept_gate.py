"""Accept gate of the control server: the sources from which nobody can connect for a moment, by a filter on its sockets.

ZMQ accepts whatever comes, and has no bound on it. A filter (BPF, socket(7)) on a listening socket drops the packets that open
a connection before the kernel answers them: such a connection costs neither a descriptor nor time here, and its peer tries
again by itself, after a second and then longer. Connections that were accepted before are not affected.

    open ──close(source)──► closed for that source ──its time──► open
      └──close_strangers()──► closed for all sources but known ones ──its time──► open

A source is an IPv4 address, or the first half of an IPv6 address: who has one of those has them all. Known are those from which
an admitted node has sent its Hello. Loop thread only.
"""

import ctypes
import ipaddress
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvpool.clock import Clock, Deadline

log = logging.getLogger(__name__)

CLOSED_MAX = 256
KNOWN_MAX = 512
# `struct ucred` (unix(7)).
_CREDENTIALS = struct.Struct("iII")
# linux/asm-generic/socket.h, linux/filter.h
_ATTACH, _DETACH = 26, 27
_INSTRUCTION = struct.Struct("HBBI")
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
# Offsets from the IP header (SKF_NET_OFF), where the data of a listening socket's packets begins behind it.
_HEADER = 0xFFF00000
_SOURCE_V4, _SOURCE_V6 = _HEADER + 12, _HEADER + 8
_DROP, _PASS = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)
_V4_BYTES = 4

Instruction = tuple[int, int, int, int]


def source_of(host: str) -> bytes:
    """The source that a numeric address counts for."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    packed = (mapped or address).packed
    return packed if len(packed) == _V4_BYTES else packed[:8]


def source_of_peer(peer: socket.socket) -> bytes:
    """The source that a connection counts for: its address, or in the file system the process."""
    if peer.family != socket.AF_UNIX:
        return source_of(peer.getpeername()[0])
    process, *_ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return b"process %d" % process


class AcceptGate:
    """See the module. `closures`: until now."""

    def __init__(self, listeners: Sequence[socket.socket], clock: Clock) -> None:
        self._listeners = listeners
        self._clock = clock
        self._closed: dict[bytes, Deadline] = {}
        self._strangers: Deadline | None = None  # until when only known sources may connect
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._has_failed = False
        self.closures = 0

    def __repr__(self) -> str:
        return f"<AcceptGate closed for {len(self._closed)} sources{' and strangers' if self._strangers else ''}>"

    @property
    def is_open(self) -> bool:
        """Whether everybody can connect."""
        return not self._closed and self._strangers is None

    def note_known(self, source: bytes) -> None:
        """A node has sent its Hello from there."""
        self._known.pop(source, None)
        self._known[source] = None
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def close(self, source: bytes, seconds: float) -> None:
        """Nobody connects from this source for so long."""
        if source not in self._closed and len(self._closed) >= CLOSED_MAX:
            self.close_strangers(seconds)
            return
        self._closed[source] = Deadline(seconds, self._clock)
        self._apply()

    def close_strangers(self, seconds: float) -> None:
        """Nobody connects but from known sources for so long."""
        self._strangers = Deadline(seconds, self._clock)
        self._apply()

    def open_due(self) -> None:
        """Open for those whose time is over."""
        due = [source for source, until in self._closed.items() if until.has_passed()]
        for source in due:
            del self._closed[source]
        is_due = self._strangers is not None and self._strangers.has_passed()
        if is_due:
            self._strangers = None
        if due or is_due:
            self._apply()

    def _apply(self) -> None:
        if self.is_open:
            for listener in self._listeners:
                listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            return
        self.closures += 1
        known = None if self._strangers is None else [one for one in self._known if one not in self._closed]
        packed = b"".join(_INSTRUCTION.pack(*one) for one in filter_of(self._closed, known))
        code = ctypes.create_string_buffer(packed, len(packed))
        program = struct.pack("HL", len(packed) // _INSTRUCTION.size, ctypes.addressof(code))
        try:
            for listener in self._listeners:
                listener.setsockopt(socket.SOL_SOCKET, _ATTACH, program)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("connections from other hosts cannot be filtered: %s", error)


def filter_of(closed: Iterable[bytes], known: Iterable[bytes] | None) -> list[Instruction]:
    """A filter that drops packets from closed sources, and from all that are not `known` where that is given."""
    closed, allowed = list(closed), None if known is None else list(known)

    def judged(size: int) -> list[Instruction]:
        rules = [*_matches(closed, size, _DROP)]
        return [*rules, _PASS] if allowed is None else [*rules, *_matches(allowed, size, _PASS), _DROP]

    v4, v6 = judged(_V4_BYTES), judged(8)
    return [
        (_LOAD_BYTE, 0, 0, _HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 1, 0, 0x40),
        (_JUMP, 0, 0, len(v4)),
        *v4,
        *v6,
    ]


def _matches(sources: Iterable[bytes], size: int, verdict: Instruction) -> Iterable[Instruction]:
    """The verdict for a packet from one of these sources of that size."""
    chosen = [source for source in sources if len(source) == size]
    if size == _V4_BYTES:
        yield from [(_LOAD_WORD, 0, 0, _SOURCE_V4)] if chosen else []
        for source in chosen:
            yield (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(source, "big"))
            yield verdict
        return
    for source in chosen:
        yield (_LOAD_WORD, 0, 0, _SOURCE_V6)
        yield (_JUMP_IF_EQUAL, 0, 3, int.from_bytes(source[:4], "big"))
        yield (_LOAD_WORD, 0, 0, _SOURCE_V6 + 4)
        yield (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(source[4:], "big"))
        yield verdict
