"""The frames of a well-behaved client and operator: one real session, recorded as it is encoded."""

import sys
from typing import Any

import pytest

import kvpool_client as kv
from kvpool.key_column import KeyColumn
from kvpool.protocol import verify_walk
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import operator as om
from kvpool.protocol.records import peers as pm
from kvpool.protocol.reserve_runs import reserve_chain
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.dropping import drop_leases, drop_reservations
from tests.rigs.payload import load_all, payload_of, store, tokens_of


def record_session(daemon: Daemon) -> list[bytes]:
    """Run a session of the client library, of two raw connections and of an operator; every frame that was sent."""
    frames: list[bytes] = []
    encode, call = m.encode, BlockingConnection.call

    def recording(record: object, sequence: int) -> bytes:
        frame = encode(record, sequence)
        frames.append(frame)
        return frame

    def recording_call(connection: BlockingConnection, request: object, *rest: Any, **named: Any) -> Any:
        frames.append(encode(request, len(frames)))
        return call(connection, request, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "encode", recording)
        patch.setattr(BlockingConnection, "call", recording_call)
        _run_session(daemon)
    kinds = {record.KIND for record in SENT}
    assert {frame[5] for frame in frames} >= kinds, "every kind of request was sent"
    return frames


# Every kind of request that the session has.
SENT: tuple[type[Any], ...] = (
    *(m.Hello, m.Acquire, m.Renew, m.IssueTicket, m.Claim, m.Reserve, m.Retain, m.Announce, m.Demote),
    *(m.Commit, m.ReportCorrupt, m.AskInfo, m.AskStats, m.Flush, m.Check, m.VerifyBytes, m.AskHitCurve),
    m.RetainKeys,
    *(one_way.DropLeases, one_way.DropReservations),
    *(em.AskEvents, em.AskSnapshot, em.AskChunkHistory, em.AskNamespaces),
    *(om.AskConnections, om.Disconnect, om.LogLevel, om.Reload),
    *(pm.AskPeers,),
)


def _run_session(daemon: Daemon) -> None:
    with daemon.connect() as pool:
        keys = pool.keys(tokens_of(1, 7 * SMALL.chunk_tokens))
        assert store(pool, keys).stored == 7
        longer = pool.keys(tokens_of(1, 8 * SMALL.chunk_tokens))
        pool.save(longer, from_=payload_of(longer, SMALL, 7), first_chunk=7).abort()
        assert pool.announce(keys).announced == 7
        assert pool.retain(keys, [kv.TokenRange(0, 64, 80, 60.0)]).accepted == 2
        assert pool.demote(keys).accepted == 7
        assert load_all(pool, keys)[0].chunks == 7
        with pool.acquire(pool.lookup(keys)) as lease, pool.claim(lease.ticket()) as claimed:
            assert claimed.chunks == 7
        assert pool.events().events
        assert sum(len(part.chunks) for part in pool.snapshot()) == 7
    with engine(daemon) as raw:
        made = raw.call(reserve_chain(b"", keys_of(0, 3)), m.Reserved)
        drop_reservations(raw, made.reservation)
        raw.call(m.Renew((3).to_bytes(8, "little")), m.Done)
        for request in (m.Acquire(keys_of(0, 3)), m.Acquire(keys_of(0, 3), 3, "node"), m.Acquire(keys_of(2, 1), 3)):
            drop_leases(raw, raw.call(request, m.Leased).lease)
        raw.call(m.ReportCorrupt(1, 0), m.Done)
    with daemon.admin() as admin:
        admin.info()
        admin.stats()
        every = verify_walk.every(admin.check()["tiers"])
        verify_walk.read_all(admin.verify_bytes, every, sys.maxsize)
        admin.hit_curve([1 << 20])
        admin.events(b"", -1)
        admin.snapshot(0)
        admin.chunk_history([keys[0]])
        admin.namespaces()
        admin.connections()
        admin.peers()
        assert not admin.disconnect(1 << 40)
        admin.retain(KeyColumn(keys_of(0, 3)), 80, 1.0)
        admin.log_level("info")
        admin.reload()
        admin.flush("test-model", None)
