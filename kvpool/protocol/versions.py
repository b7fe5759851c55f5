"""Versions of the local protocol: the one that a connection uses, and the fields that a peer of an earlier version gets.

A client's hello has the oldest and the newest version that it speaks, the welcome the one that the daemon has chosen: the
newest that both speak. Towards a peer of an earlier version a record is cut to the fields that it had. An engine's client reads
the daemon's shared memory too, whose layout changes with the version: one of another version is refused with the remedy;
operators of every version are served. docs/protocol.md defines what makes a new version. Pure functions; any thread.

    1  as recorded in tests/golden/protocol_1.txt
    2  a range in Hello, the choice in Welcome; DropLease, DropLeases and DropReservation; Batch; AskConnections, Disconnect,
       LogLevel and Reload; whether DemoteAll respects the write budget
    3  slots in Leased: the shared index has its words by slot. Engines speak no earlier one
    4  remote_bytes in Welcome, and a third descriptor with it: the table of other nodes' chunks; LandSaved, AskPeers and
       AcquireFrom; has_store in Welcome, Seek and Sought; the level STORE in usage reports
    5  ReportChunks and ChunksTaken: chunks that engines have in block pools of their own
    6  OpenDevice, DeviceArena, FindCopies and Copies: copies of chunks in device memory
    7  summaries in a layout; compute by lookup in usage reports
    8  head groups in a layout; compute by lookup on devices in usage reports
    9  groups in a layout; AcquireGroups, ReserveGroup and CommitGroup
    10  ReserveShare and the state PART; claims in IssueTicket
    11  head groups in a layout's groups; ReserveGroupShare; FindGroupCopies; SeekEach and SoughtEach: chunks of groups in the
        shared store; AnnounceGroups, and Demote of groups
    12  Promise; leases over groups of up to 4096 holds; NameTokens
    13  name in Hello; Drain, AskModels and AskConfig
"""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from kvpool.errors import Refused
from kvpool.layout import Layout
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import device as dm
from kvpool.protocol.records import engine_chunks as ec
from kvpool.protocol.records import groups as gm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import operator as om
from kvpool.protocol.records import peers as pm
from kvpool.protocol.records import promises as pr
from kvpool.protocol.records import seeking as sk

OLDEST = 1
OLDEST_OF_ENGINES = 3
NEWEST = m.PROTOCOL_VERSION
# The version that a kind of frame came with, where it was not the first.
SINCE: dict[type[Any], int] = {
    one_way.DropLease: 2,
    one_way.DropLeases: 2,
    one_way.DropReservation: 2,
    one_way.LandSaved: 4,
    bm.Batch: 2,
    bm.Batched: 2,
    om.AskConnections: 2,
    om.Disconnect: 2,
    om.LogLevel: 2,
    om.Reload: 2,
    om.Drain: 13,
    om.AskModels: 13,
    om.AskConfig: 13,
    pm.AskPeers: 4,
    pm.AcquireFrom: 4,
    sk.Seek: 4,
    sk.Sought: 4,
    ec.ReportChunks: 5,
    ec.ChunksTaken: 5,
    dm.OpenDevice: 6,
    dm.DeviceArena: 6,
    dm.FindCopies: 6,
    dm.Copies: 6,
    dm.FindGroupCopies: 11,
    gm.AcquireGroups: 9,
    gm.ReserveGroup: 9,
    gm.CommitGroup: 9,
    gm.ReserveShare: 10,
    gm.ReserveGroupShare: 11,
    sk.SeekEach: 11,
    sk.SoughtEach: 11,
    gm.AnnounceGroups: 11,
    one_way.NameTokens: 12,
    pr.Promise: 12,
    pr.Promised: 12,
}
# How many fields a record had up to a version, the oldest first; later fields have defaults.
FIELDS_UP_TO: dict[type[Any], tuple[tuple[int, int], ...]] = {
    m.Hello: ((1, 5), (12, 6)),
    m.Welcome: ((1, 10), (3, 11)),
    m.DemoteAll: ((1, 1),),
    m.Leased: ((2, 5),),
    m.IssueTicket: ((9, 1),),
}
# Layouts had no summaries, no head groups, no groups, and no groups with head groups, before.
_SUMMARIES_SINCE, _HEAD_GROUPS_SINCE, _GROUPS_SINCE, _GROUP_HEADS_SINCE = 7, 8, 9, 11
# Tickets for several claims, and leases of up to HOLDS_MAX holds.
CLAIMS_SINCE, HOLDS_SINCE = 10, 12
# Descriptors that came with a welcome before the table of other nodes' chunks did.
_REMOTE_SINCE = 4
_DESCRIPTORS_BEFORE = 2
# The versions as whose client to greet a daemon, the next one where it takes the hello for a bad frame: fields of a hello came
# with 13 and with 2.
GREETINGS = (NEWEST, 12, 1)

Record = TypeVar("Record")


def oldest_of(role: str) -> int:
    """The oldest version that a client of this role can speak."""
    return OLDEST if role == m.ROLE_ADMIN else OLDEST_OF_ENGINES


def oldest_for(layout: Layout) -> int:
    """The oldest version in which an engine can name its layout."""
    if any(group.head_groups != 1 for group in layout.groups):
        return _GROUP_HEADS_SINCE
    if layout.groups or layout.group is not None:
        return _GROUPS_SINCE
    if layout.head_groups != 1:
        return _HEAD_GROUPS_SINCE
    return _SUMMARIES_SINCE if layout.summaries else OLDEST_OF_ENGINES


def choose(oldest: int, newest: int, role: str) -> int:
    """The version for a peer that speaks these. Raises Refused where there is none."""
    chosen, least = min(newest, NEWEST), oldest_of(role)
    if chosen < max(oldest, least):
        older = "client (install this daemon's kvpool where the engine runs)" if newest < least else "daemon"
        spoken = f"client speaks protocol {oldest} to {newest}, this daemon {least} to {NEWEST}"
        raise Refused("version", f"{spoken}: update the {older}")
    return chosen


def encode_for(record: object, sequence: int, version: int) -> bytes:
    """The frame that carries `record` to a peer of this version."""
    if version >= NEWEST:
        return m.encode(record, sequence)
    if version < SINCE.get(type(record), OLDEST):
        raise AssertionError(f"{type(record).__name__} is sent to a peer of version {version}")
    values = m.values_of(record)[: fields_of(type(record), version)]
    return frames.encode(record.KIND, sequence, values)  # type: ignore[attr-defined]


def fields_of(record: type[Any], version: int) -> int | None:
    """How many fields a record has in a version; None: all of them."""
    return next((count for last, count in FIELDS_UP_TO.get(record, ()) if version <= last), None)


def descriptors_for(fds: tuple[int, ...], version: int) -> tuple[int, ...]:
    """Those of a welcome's descriptors that a peer of this version expects."""
    return fds if version >= _REMOTE_SINCE else fds[:_DESCRIPTORS_BEFORE]


def decode_from(record: type[Record], values: list[object], version: int) -> Record:
    """The record of a peer of this version. Raises ProtocolError."""
    is_shorter = fields_of(record, version) is not None
    return decode_of_any(record, values) if is_shorter else m.decode_as(record, values)


def decode_of_any(record: type[Record], values: list[object]) -> Record:
    """The record of a peer whose version is not known yet: fields that came later have their defaults. Raises ProtocolError."""
    if any(len(values) == count for _, count in FIELDS_UP_TO[record]):
        later = fields(record)[len(values) :]  # type: ignore[arg-type]
        assert all(field.default is not MISSING for field in later)
        values = [*values, *(field.default for field in later)]
    return m.decode_as(record, values)
