"""Lease frames: an engine's requests about leases and plain saves, served from the bytes that arrived to the bytes of the
answer in one call.

An ordinary acquire of what DRAM has, a release, a renewal; a reservation for one chain that has room, a commit of it.
Everything else, and a connection whose leases have watchers, is left to the verbs, which stand on the same native desks.
Control thread only.
"""

from collections.abc import Callable

import kvpool_native
from kvpool.clock import Clock
from kvpool.index.sessions import EngineSession
from kvpool.pool.chains import Chains
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.server.metrics.request_times import RequestTimes

_KINDS = (m.Acquire.KIND, m.Leased.KIND, one_way.DropLeases.KIND, m.Renew.KIND, m.Done.KIND)
# Answers of one call, beside the last one: then it is seen whether the peer reads them.
ANSWER_BYTES_MAX = 64 << 10
# Serves leading frames of what arrived, from a byte on, for so many nanoseconds: how many bytes they are, and the answers.
# None: not for here.
ServeAtOnce = Callable[[bytes | bytearray, int, int], tuple[int, bytes] | None]


class LeaseFrames:
    """Those of all connections."""

    def __init__(self, chains: Chains, times: RequestTimes, clock: Clock) -> None:
        self._chains = chains
        self._clock = clock
        desk = chains.readers.desk
        bounds = (frames.FRAME_BYTES_MAX, m.RENEWALS_MAX, ANSWER_BYTES_MAX)
        saves = kvpool_native.SaveFrames(
            chains.writers.desk,
            reserve=m.Reserve.KIND,
            reserved=m.Reserved.KIND,
            commit=m.Commit.KIND,
            committed=m.Committed.KIND,
        )
        self._native = kvpool_native.LeaseFrames(desk, times.native, saves, _KINDS, *bounds)

    def of_session(self, session: EngineSession) -> ServeAtOnce:
        """What serves the frames of a session's connection, of the newest version."""
        chains, clock, reader = self._chains, self._clock, session.reader
        serve_frames, writer = self._native.serve, chains.writers.writer_of(session)

        def serve(arrived: bytes | bytearray, first: int, left_ns: int) -> tuple[int, bytes] | None:
            if chains.has_watchers(session):
                return None
            own = writer if chains.may_save_at_once else None
            is_behind = own is not None and chains.journal.is_behind
            with chains.tiering.protecting(own is not None):
                served = serve_frames(reader, own, arrived, first, clock.now_ns(), left_ns)
                if served is None and is_behind:
                    chains.journal.keep_up()  # what was published is recorded before a reservation evicts more
                    served = serve_frames(reader, own, arrived, first, clock.now_ns(), left_ns)
            if served is None:
                return None
            chains.expiry.schedule()
            if served.has_backlog:
                chains.readers.ending.call_again()
            if saves := served.saves:
                chains.note_saves(session, saves)
            return served.consumed, served.answers

        return serve
