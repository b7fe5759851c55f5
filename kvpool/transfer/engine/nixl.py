"""NIXL behind the calls that the child process makes: writes into other nodes' bounce buffers.

Imported by that process alone, and the library only when it begins: it is an optional package. Measured on 1.5.1: its progress
thread keeps a core busy, so there is none, and it moves only while it is asked; a name that is used again is refused and the
former agent stays, so each life has a name of its own; a transfer that was given up still writes; over TCP it listens on every
device's address, without authentication; at the interpreter's end it crashes, so that the process ends by `os._exit`.

An agent's description is what its memory is written by: this node's goes to the owners it asks, and no owner's to anybody. It
counts for the node that its agent is named for alone, and the name is read before the library knows it: to load another node's,
or to remove it, would end that node's writes. Over TCP it counts only where it leads to the asking node's host, and to a port
and an identity that no other node and not this process has (`nixl_form.py`). Bounds are by the peer, whose key nobody else has.
Threads: any. Guarded by `_turn`: every call of the library.
"""

import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import ipaddress
import itertools
import mmap
import os
import resource
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.clock import Deadline
from kvpool.ids import NIXL_PACKAGES
from kvpool.peers.control.records import AGENT_BYTES_MAX
from kvpool.transfer.child.mooncake import INFINIBAND, has_rdma_devices
from kvpool.transfer.engine.library import open_files
from kvpool.transfer.engine.nixl_form import Form, is_host, name_in

BACKEND = "UCX"
# UCX's names of transports, by protocol: one host's daemons have shared memory of kvpool's own.
TRANSPORTS = {"tcp": "tcp", "rdma": "ib"}
# Agents that are known at once, of all nodes and of one, which has one for each life: beyond, the one that was used longest ago
# is forgotten. Of one node no more are met within NODE_AGENTS_S, the same one again included: each takes two descriptors, which
# the library keeps when it is removed (measured). The daemon ends the process once so many were met that they take a quarter of
# what it may have and nothing is asked for, or twice as many.
AGENTS_MAX = 1024
NODE_AGENTS_MAX = 4
NODE_AGENTS_S = 60.0
MET_PART = 8
# A place that a node was written at is no other's for so long.
PLACE_S = 600.0
PLACES_MAX = 4096
# For the library to end another thread's call: while one hangs, nothing is looked at.
TURN_S = 0.1
SEPARATOR = "/"
SYS_NET = Path("/sys/class/net")
IF_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_LISTENING = "0A"


# A peer, its node's name, the host that it asks from, and the description of its agent.
Agent = tuple[str, str, str, bytes]


class NixlClient:
    """See `child.MoveClient` and `child.Notices`."""

    def __init__(
        self, agent: Any, errors: tuple[type[Exception], ...], base: int, *, facts: Mapping[str, Any], form: Form | None
    ) -> None:
        """`form`: of descriptions, over TCP."""
        self.facts = facts
        self.met = 0
        self._form = form
        self._places: OrderedDict[object, tuple[str, Deadline]] = OrderedDict()  # whose each is
        self._agent = agent
        self._errors = errors
        self._base = base
        self._turn = threading.Lock()
        self._names: OrderedDict[Agent, str] = OrderedDict()
        self._lately: dict[str, list[Deadline]] = {}  # of each peer, for each agent that was met within NODE_AGENTS_S
        self._writes: dict[int, tuple[Any, Agent]] = {}  # handle, and whose memory
        self._numbers = 0

    @property
    def notices(self) -> "NixlClient":
        """See `MoveClient`."""
        return self

    def submit(self, other: Sequence[Any], offset: int, address: int, size: int) -> int:
        """See `MoveClient`. `other`: an Agent."""
        agent = _agent_of(other)
        with self._turn:
            try:
                self._check_place(agent, address, size)
                name = self._name_of(agent)
                here = self._agent.get_xfer_descs([(self._base + offset, size, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
                handle = self._agent.initialize_xfer("WRITE", here, there, name)
            except self._errors:
                self._forget(agent)
                return -1
            try:
                has_failed = self._agent.transfer(handle) == "ERR"
            except self._errors:
                has_failed = True
            if has_failed:
                self._release(handle)
                self._forget(agent)
                return 0
            self._numbers += 1
            self._writes[self._numbers] = (handle, agent)
            return self._numbers

    def look(self, number: int) -> int:
        """See `MoveClient`."""
        if not self._turn.acquire(timeout=TURN_S):
            return 0
        try:
            handle, agent = self._writes[number]
            try:
                state = self._agent.check_xfer_state(handle)
            except self._errors:
                state = "ERR"
            if state == "PROC":
                return 0
            del self._writes[number]
            self._release(handle)
            if state == "DONE":
                return 1
            self._forget(agent)
            return -1
        finally:
            self._turn.release()

    def notify(self, other: Sequence[Any], mark: bytes) -> bool:
        """See `Notices`."""
        with self._turn:
            try:
                self._agent.send_notif(self._name_of(_agent_of(other)), mark)
            except self._errors:
                return False
        return True

    def heard(self) -> list[bytes]:
        """See `Notices`."""
        if not self._turn.acquire(timeout=TURN_S):
            return []
        try:
            found: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        except self._errors:
            return []
        finally:
            self._turn.release()
        return [mark for marks in found.values() for mark in marks]

    def close(self) -> None:
        """See `MoveClient`. The process ends at once: nothing is given back that the system does not take."""

    def _name_of(self, agent: Agent) -> str:
        """The agent's name. Raises ValueError, or an error of the library, where it is none, or another node's, and after too
        many."""
        name = self._names.get(agent, "")
        if name:
            self._names.move_to_end(agent)
            return name
        peer, node, _, described = agent
        name = name_in(described)
        if name.rpartition(SEPARATOR)[0] != node or name in self._names.values():
            raise ValueError(f"{name} is no agent of {node}, or is described otherwise")
        lately = {
            whose: left for whose, met in self._lately.items() if (left := [one for one in met if not one.has_passed()])
        }
        if len(lately.setdefault(peer, [])) >= NODE_AGENTS_MAX:
            raise ValueError(f"{node} has had {NODE_AGENTS_MAX} agents within {NODE_AGENTS_S:g} s")
        own = [one for one in self._names if one[0] == peer]
        if len(own) >= NODE_AGENTS_MAX:
            self._make_room(own)
        elif len(self._names) >= AGENTS_MAX:
            self._make_room(list(self._names))
        if self.met >= 2 * self.facts["met_max"]:
            raise ValueError(f"{self.met} agents were met, whose descriptors NIXL keeps: a new process has none")
        self.met += 1
        lately[peer].append(Deadline(NODE_AGENTS_S))
        self._lately = lately
        self._agent.add_remote_agent(described)
        self._names[agent] = name
        return name

    def _check_place(self, agent: Agent, address: int, size: int) -> None:
        """Raises ValueError where an agent's description leads elsewhere than to its own node's memory."""
        peer, node, host, described = agent
        if self._form is None:
            return
        place = self._form.place_in(described)
        if not is_host(place, host):
            raise ValueError(f"an agent of {node} is at {place.host or 'this machine'}, expected {host}")
        if not place.has(address, size):
            raise ValueError(f"{node} wants bytes outside of its agent's memory")
        own = self._form.own
        if (place.port == own.port and place.host in ("", own.host)) or place.identity == own.identity:
            raise ValueError(f"an agent of {node} is this process")
        claimed = ((place.host, place.port), place.identity)
        for one in claimed:
            whose, until = self._places.get(one, (peer, None))
            if whose != peer and until is not None and not until.has_passed():
                raise ValueError(f"an agent of {node} is another node's")
        for one in claimed:
            self._places[one] = (peer, Deadline(PLACE_S))
            self._places.move_to_end(one)
        while len(self._places) > PLACES_MAX:
            self._places.popitem(last=False)

    def _make_room(self, agents: Sequence[Agent]) -> None:
        """Forget the first agent that is not written to. Raises ValueError where there is none."""
        if not any(self._forget(agent) for agent in agents):
            raise ValueError("there is no room for a further agent")

    def _forget(self, agent: Agent) -> bool:
        """An agent's connection has failed, or is needed no longer: it is made anew where it is wanted again. False while it
        is written to."""
        if any(whose == agent for _, whose in self._writes.values()):
            return False
        name = self._names.pop(agent, None)
        if name is not None:
            with contextlib.suppress(*self._errors):  # the library has forgotten it by itself
                self._agent.remove_remote_agent(name)
        return True

    def _release(self, handle: Any) -> None:
        """A write has ended, or has not begun."""
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(handle)


def _agent_of(other: Sequence[Any]) -> Agent:
    peer, node, host, described = other
    return peer, node, host, described


def ports_without(first: int, last: int, former: Sequence[int]) -> tuple[int, int]:
    """The most ports in a row that no former life had; all of them where each was one's. Others remember what they knew of
    those, and would write into this life."""
    edges = [first - 1, *sorted({one for one in former if first <= one <= last}), last + 1]
    begin, end = max(itertools.pairwise(edges), key=lambda edge: edge[1] - edge[0])
    return (begin + 1, end - 1) if end - begin > 1 else (first, last)


def device_of(host: str) -> str:
    """The network device that has an address; empty where none has it as its first one."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        lines = [line.split() for line in IF_INET6.read_text().splitlines()] if IF_INET6.exists() else []
        return next((line[-1] for line in lines if bytes.fromhex(line[0]) == address.packed), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, device in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, device.encode().ljust(256, b"\0"))
                if found[20:24] == address.packed:
                    return device
    return ""


def connect_nixl(settings: Mapping[str, Any], memory: mmap.mmap) -> NixlClient:
    """Begin to serve and to write. Raises ConnectionError, ImportError or OSError with the reason."""
    protocol, devices = settings["protocol"], settings["devices"]
    if protocol == "rdma" and not has_rdma_devices():
        raise ConnectionError(f"peer.rdma_protocol is 'rdma' and {INFINIBAND} has no device")
    known = {one.name for one in (INFINIBAND if protocol == "rdma" else SYS_NET).iterdir()}
    if unknown := sorted(set(filter(None, devices.split(","))) - known):
        raise ConnectionError(
            f"peer.rdma_devices names {', '.join(unknown)}, expected devices of this machine for {protocol}: "
            f"{', '.join(sorted(known))}"
        )
    first, last = settings["ports"]
    if protocol == "tcp":
        device = device_of(settings["host"])
        if not device or devices not in ("", device):
            raise ConnectionError(
                f"peer.rdma_devices is {devices!r}: over tcp NIXL uses the device whose first address is {settings['host']}, "
                f"{device or 'which none of this machine is'}"
            )
        devices = device
    first, last = ports_without(first, last, settings["former_ports"])
    os.environ["UCX_TLS"] = TRANSPORTS[protocol]
    os.environ["UCX_TCP_PORT_RANGE"] = f"{first}-{last}"
    if devices:
        suffix = ":1" if protocol == "rdma" else ""  # a device's port, which UCX names, too
        os.environ["UCX_NET_DEVICES"] = ",".join(f"{device}{suffix}" for device in devices.split(","))
    os.environ["UCX_TCP_AF_PRIO"] = "inet6" if ":" in settings["host"] else "inet"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    api, bindings = _import_nixl()
    errors = tuple(one for one in vars(bindings).values() if isinstance(one, type) and issubclass(one, Exception))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    name = f"{settings['node']}{SEPARATOR}{secrets.token_hex(16)}"
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        agent.register_memory([(base, len(memory), 0, "")], "DRAM")
        described: bytes = agent.get_agent_metadata()
    except errors as error:
        raise ConnectionError(
            f"NIXL cannot begin with {protocol}, devices {devices!r}, ports {first} to {last} and {len(memory)} bytes: {error}"
            + (" (RDMA pins them: see LimitMEMLOCK)" if protocol == "rdma" else "")
        ) from error
    if len(described) > AGENT_BYTES_MAX:
        raise ConnectionError(
            f"NIXL describes this node in {len(described)} bytes, expected {AGENT_BYTES_MAX} at most: see peer.rdma_devices"
        )
    port = _listening_port()
    form: Form | None = None
    reason = "another name"
    try:
        is_read = name_in(described) == name
        if protocol == "tcp":
            form = Form(described, host=settings["host"], port=port, base=base, size=len(memory))
    except ValueError as error:
        is_read, reason = False, str(error)
    if not is_read:
        raise ConnectionError(
            f"this release of NIXL describes agents otherwise than 1.5.1 ({reason}): install kvpool[nixl]"
        )
    host = f"[{settings['host']}]" if ":" in settings["host"] else settings["host"]
    met_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // MET_PART
    facts = {"server": f"{host}:{port}", "base": base, "port": port, "agent": described, "met_max": met_max}
    return NixlClient(agent, (*errors, ValueError), base, facts=facts, form=form)


def _import_nixl() -> tuple[Any, Any]:
    """The library's two modules. Raises ImportError that says what to install."""
    package = next((one for one in NIXL_PACKAGES if importlib.util.find_spec(one) is not None), NIXL_PACKAGES[0])
    try:
        return importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings")
    except ImportError as error:
        raise ImportError(f"NIXL cannot be imported ({error}): install kvpool[nixl]") from error


def _listening_port() -> int:
    """A TCP port of this process that others connect to; 1 where there is none, for RDMA has no such ports."""
    own = open_files()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in own:
                return int(fields[1].rpartition(":")[2], 16)
    return 1
