"""Failpoints: named points at which tests make daemon or client fail.

    KVPOOL_FAILPOINT=name:nth:action[,name:nth:action…]

`nth` is the time the point is reached (1, 2, …) or `*` for every time. Actions: `crash` (SIGKILL of this process), `error` (the
failure that is natural at that point), `delay(200ms)` (the thread sleeps for so long).

The variable is read once, at import. Without it `reach` is a function that does nothing; no point lies in a loop over
chunks. Every point is in `FAILPOINTS`, and a test compares table and code. Any thread.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.errors import ConfigError, DaemonUnreachable, InvalidArgument, Refused
from kvpool.units import parse_duration

log = logging.getLogger(__name__)

VARIABLE = "KVPOOL_FAILPOINT"

FAILPOINTS = {
    "daemon.handshake.before_welcome": "a hello was admitted, nothing has been answered",
    "daemon.handshake.after_welcome": "welcome and descriptors are sent, the connection is not served yet",
    "daemon.request.before": "a request was read, before its handler",
    "daemon.answer.before_send": "a request was carried out, its answer is not sent",
    "daemon.connection.ended": "a connection has ended, before what it held is released",
    "daemon.reserve.before": "before slots are reserved",
    "daemon.reserve.after": "slots are reserved, before the answer",
    "daemon.evict.after": "chunks were evicted for a reservation, before the answer",
    "daemon.commit.before_publish": "checksums have come, nothing is visible",
    "daemon.commit.after_publish": "chunks are visible, before the answer",
    "daemon.end.before": "before a reservation is given up",
    "daemon.expire.before": "before leases and reservations are checked for their deadlines",
    "daemon.acquire.before_hold": "before a prefix is held",
    "daemon.acquire.after_grant": "a lease was granted, before the answer",
    "daemon.release.before": "before a lease ends",
    "daemon.ticket.before_issue": "before a ticket is issued",
    "daemon.ticket.before_claim": "before a ticket is claimed",
    "daemon.retain.before": "before chunks get other priorities",
    "daemon.announce.before": "before announced chunks are held or promoted",
    "daemon.demote.asked": "before chunks are demoted because of a client's hint",
    "daemon.flush.before": "before an operator's flush",
    "daemon.keep.before_give": "this life's memory is whole, the keeper has the former life's alone",
    "daemon.keep.given": "the keeper has one more file of this life's memory",
    "daemon.keep.after_drop": "the keeper has this life's memory alone",
    "daemon.prefault.segment": "before a segment of the arena gets its pages",
    "daemon.transfer.job": "a transfer thread takes a job",
    "daemon.verify.job": "before chunks are read to compare their checksums",
    "daemon.drain.begin": "a signal has come, before the daemon drains",
    "daemon.drain.end": "every chunk is demoted, before the threads end",
    "daemon.ssd.look": "the directory is locked, nothing of an earlier life has been read",
    "daemon.ssd.open_files": "before segment files are opened",
    "daemon.ssd.open_catalogue": "before the catalogue is opened",
    "daemon.ssd.identity": "an identity is written beside the old one, not yet in its place",
    "daemon.ssd.restore": "before a batch of chunks is restored",
    "daemon.ssd.restored": "an earlier life's chunks are found, the tier is not yet in use",
    "daemon.demote.before_write": "slots are reserved on disk, before the write is queued",
    "daemon.demote.written": "leading chunks of a job are on disk, not yet visible there",
    "daemon.demote.committed": "they are visible there, before the catalogue gets their rows",
    "daemon.promote.held": "a prefix is held on disk, before slots in DRAM are reserved",
    "daemon.pull.before_read": "slots in DRAM are reserved, before the pull begins",
    "daemon.promote.before_read": "slots in DRAM are reserved, before the read is queued",
    "daemon.promote.landed": "a chunk was read back from disk, before it is an ordinary one",
    "daemon.catalogue.opened": "the catalogue is open, before its first checkpoint",
    "daemon.catalogue.before_commit": "a batch of rows is in a transaction",
    "daemon.catalogue.after_commit": "a batch of rows is committed, not synced",
    "daemon.checkpoint.before_data": "before segment files are synced",
    "daemon.checkpoint.before_catalogue": "segment files are synced, the catalogue is not",
    "daemon.checkpoint.after": "a checkpoint is complete, before it is reported",
    "client.connect.before": "before a connection is tried",
    "client.connect.after_welcome": "descriptors have come, nothing is mapped",
    "client.renew.before": "before leases are renewed",
    "client.save.before_reserve": "before slots are asked for",
    "client.save.after_reserve": "slots are reserved, nothing is copied",
    "client.save.before_commit": "everything is copied, before the daemon is notified",
    "client.save.after_commit": "the daemon has answered a commit",
    "client.end.before": "before the daemon is notified that a reservation is no longer written",
    "client.acquire.after": "a lease was answered",
    "client.load.before": "a lease is there, before its chunks are copied",
    "client.load.before_result": "everything was copied, before the result is returned",
    "client.release.before": "before a lease is released",
    "client.retain.before": "before a retention request is sent",
    "client.announce.before": "before an announcement is sent",
    "client.report_corrupt.before": "a checksum did not match, before the daemon is notified",
}

# Steps that cannot fail by themselves: they can be crashed or delayed.
WITHOUT_ERROR = {
    "daemon.connection.ended",
    "daemon.expire.before",
    "daemon.drain.begin",
    "daemon.drain.end",
    "daemon.keep.before_give",
    "daemon.keep.given",
    "daemon.keep.after_drop",
    "daemon.ssd.restore",
    "daemon.ssd.restored",
    "daemon.demote.written",
    "daemon.demote.committed",
    "daemon.promote.held",
    "daemon.promote.landed",
    "client.save.after_reserve",
    "client.load.before",
    "client.load.before_result",
}

_POINT = re.compile(r"([a-z_.]+):(\*|[1-9][0-9]*):(crash|error|delay\(([^)]+)\))")

Failure = Callable[[str], BaseException]


@dataclass(slots=True)
class _Armed:
    """One point of the variable. `seen` counts how often it was reached; guarded by `_lock`."""

    nth: int | None
    action: str
    delay_s: float
    seen: int = 0


def parse(text: str) -> dict[str, _Armed]:
    """The points of the variable's value. Raises ConfigError with every fault."""
    armed: dict[str, _Armed] = {}
    faults = []
    for part in filter(None, text.split(",")):
        match = _POINT.fullmatch(part.strip())
        if match is None:
            faults.append(f"{VARIABLE} has {part!r}, expected name:nth:crash, error or delay(DURATION)")
            continue
        name, nth, action, delay = match.groups()
        if name not in FAILPOINTS:
            faults.append(f"{VARIABLE} names {name!r}, expected one of: {', '.join(FAILPOINTS)}")
            continue
        if action == "error" and name in WITHOUT_ERROR:
            faults.append(f"{VARIABLE} has {part!r}: nothing fails at this point, expected crash or delay(DURATION)")
            continue
        try:
            delay_s = parse_duration(delay) if delay else 0.0
        except InvalidArgument as error:
            faults.append(f"{VARIABLE} has {part!r}: {error}")
            continue
        armed[name] = _Armed(None if nth == "*" else int(nth), action.partition("(")[0], delay_s)
    if faults:
        raise ConfigError(faults)
    return armed


def refused(name: str) -> BaseException:
    """The natural failure of a request."""
    return Refused("failpoint", name)


def unreachable(name: str) -> BaseException:
    """The natural failure of a round trip."""
    return DaemonUnreachable(f"failpoint {name}")


def _os_error(name: str) -> BaseException:
    return OSError(5, f"failpoint {name}")


# What `reach` is where no point is armed: a look into nothing, which costs a fraction of a call of a function of Python.
_do_nothing: Callable[..., None] = dict[str, None]().get


_lock = threading.Lock()
_armed: dict[str, _Armed] = {}  # guarded by _lock


def _act(name: str, failure: Failure = _os_error) -> None:
    assert name in FAILPOINTS
    with _lock:
        point = _armed.get(name)
        if point is None:
            return
        point.seen += 1
        if point.nth is not None and point.seen != point.nth:
            return
    log.warning("failpoint %s reached: %s", name, point.action)
    if point.action == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "delay":
        time.sleep(point.delay_s)
        return
    raise failure(name)


def arm_from_environment() -> Callable[..., None]:
    """Arm the points in the variable. Returns the `reach` to use from then on. A fault disarms all: see `faults`."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return _do_nothing
    try:
        _armed.update(parse(text))
    except ConfigError as error:
        faults.extend(error.faults)
        for fault in faults:
            log.warning("%s", fault)
        return _do_nothing
    return _act


def is_armed() -> bool:
    """Whether any point is armed: then requests are served where the points are."""
    return reach is not _do_nothing


# Faults of the variable; the daemon refuses to start with any.
faults: list[str] = []
reach: Callable[..., None] = arm_from_environment()
