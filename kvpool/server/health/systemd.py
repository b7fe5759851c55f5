"""Service manager messages by sd_notify: a datagram of `NAME=value` lines to the socket in NOTIFY_SOCKET.

Without that variable nothing is sent and there is no watchdog. A message that cannot be delivered is counted and logged once:
the daemon serves engines with or without a manager. No library is needed for one datagram.

Any thread may call it; each call opens, sends and closes, and blocks for at most SEND_TIMEOUT_S, `wait_read` for its time more.
"""

import logging
import os
import select
import socket
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 0.1
_US_PER_S = 1_000_000
_NS_PER_US = 1_000


class ServiceManager:
    """The manager named by an environment.

    `watchdog_interval_s`: how often it expects WATCHDOG=1, None where it does not watch this process.
    """

    def __init__(self, environment: Mapping[str, str], *, pid: int | None = None) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._unsent = 0
        own = os.getpid() if pid is None else pid
        self.watchdog_interval_s = _watchdog_interval_s(environment, own) if self._address is not None else None

    def __repr__(self) -> str:
        return f"<ServiceManager {'away' if self._address is None else self._address!r}, {self._unsent} unsent>"

    @property
    def is_there(self) -> bool:
        """Whether there is one."""
        return self._address is not None

    def ready(self, status: str) -> None:
        """The daemon serves."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self, now_ns: int) -> None:
        """The daemon has begun to read its configuration again, at this monotonic time; `reloaded` ends that."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_ns // _NS_PER_US}")

    def reloaded(self) -> None:
        """The daemon has read its configuration again."""
        self._send("READY=1")

    def stopping(self, status: str) -> None:
        """The daemon has begun to end."""
        self._send("STOPPING=1", f"STATUS={status}")

    def extend(self, seconds: float) -> None:
        """The daemon still works and needs at most so long, or extends again: no time limit ends it before."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * _US_PER_S)}", "WATCHDOG=1")

    def status(self, status: str) -> None:
        """One status line for users of the manager."""
        self._send(f"STATUS={status}")

    def alive(self) -> None:
        """The daemon works: restart the manager's watchdog."""
        self._send("WATCHDOG=1")

    def store(self, name: str, *descriptors: int) -> bool:
        """Keep files for the next start of the service, under one name; False where the message was not delivered."""
        return self._send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=descriptors)

    def remove_stored(self, name: str) -> bool:
        """Keep the files of a name no longer; False where the message was not delivered."""
        return self._send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def wait_read(self, timeout_s: float) -> bool:
        """Whether it has done all that was sent before: it closes the descriptor of BARRIER=1 then. A systemd from before 246
        does so with any that it has no use for."""
        try:
            own_end, its_end = os.pipe()
        except OSError:
            return False
        try:
            is_sent = self._send("BARRIER=1", descriptors=(its_end,))
        finally:
            os.close(its_end)
        with os.fdopen(own_end, "rb"):
            poll = select.poll()
            poll.register(own_end, select.POLLIN)
            return is_sent and bool(poll.poll(timeout_s * 1000))

    def _send(self, *assignments: str, descriptors: Sequence[int] = ()) -> bool:
        if self._address is None:
            return False
        message = "\n".join(line.replace("\n", " ") for line in assignments).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                # Connected, because only a connected socket waits for room in the manager's queue.
                sender.settimeout(SEND_TIMEOUT_S)
                sender.connect(self._address)
                socket.send_fds(sender, [message], list(descriptors))
        except OSError as error:
            self._unsent += 1
            level = logging.WARNING if self._unsent == 1 else logging.DEBUG
            log.log(level, "the message %s to the service manager failed: %s", assignments[0], error)
            return False
        return True


def _address(name: str) -> str | bytes | None:
    """A path, or `@name` of the abstract namespace; anything else is no valid address."""
    if name.startswith("/"):
        return name
    return b"\0" + os.fsencode(name[1:]) if name.startswith("@") and len(name) > 1 else None


def _watchdog_interval_s(environment: Mapping[str, str], pid: int) -> float | None:
    interval, watched = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or int(interval) == 0 or (watched and watched != str(pid)):
        return None
    return int(interval) / _US_PER_S
