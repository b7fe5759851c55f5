"""Beginning of a load: hands leased chunks to the native threads, to copy them or to check them where they lie.

The Pool has checked the arguments. Every failure of the daemon gives a load that ends with nothing. Any thread.
"""

from collections.abc import Callable

from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool.protocol.records import messages as m
from kvpool.types import LoadReason
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.verbs.lease import LeaseHold
from kvpool_client.verbs.load import Load, LoadRun
from kvpool_client.verbs.results import LoadResult


class LoadStarter:
    """Starts the loads of one Pool."""

    def __init__(
        self, layout: Layout, share: Share, *, link: Link, copies: Copies, counters: Counters, timeout_s: float
    ) -> None:
        self._layout = layout
        self._share = share
        self._link = link
        self._copies = copies
        self._counters = counters
        self._timeout_s = timeout_s

    def begin(self, lease: LeaseHold, first_chunk: int, blocks: EngineBlocks) -> Load:
        """A load of leased chunks from `first_chunk` on into `blocks`."""
        return self._begin(lease, first_chunk, lambda session: self._copies.load(session, lease, first_chunk, blocks))

    def begin_check(self, lease: LeaseHold, first_chunk: int) -> Load:
        """A load of leased chunks from `first_chunk` on that copies nothing: it compares their KV with its checksums where it
        lies."""
        return self._begin(lease, first_chunk, lambda session: self._copies.check(session, lease, first_chunk))

    def _begin(self, lease: LeaseHold, first_chunk: int, start: Callable[[Session], LoadRun | None]) -> Load:
        session = lease.session
        if first_chunk == lease.chunks or session is None or not lease.is_live:
            is_connected = session is not None and session.is_alive  # else the lease was released
            ended = LoadReason.GONE if is_connected else LoadReason.DISCONNECTED
            reason = LoadReason.COMPLETE if first_chunk == lease.chunks else ended
            return self._new_load(lease, None, first_chunk, reason)
        failpoint.reach("client.load.before")
        run = start(session)
        load = self._new_load(lease, run, first_chunk, LoadReason.COMPLETE if run is not None else LoadReason.GONE)
        if run is not None:
            if not lease.begin_load(load):
                run.cancel()
            for lease_id in lease.ids:
                self._link.use_lease(lease_id)
        return load

    def _new_load(self, lease: LeaseHold, run: LoadRun | None, first_chunk: int, early: LoadReason) -> Load:
        return Load(
            lease,
            run,
            first_chunk=first_chunk,
            chunk_tokens=self._layout.chunk_tokens,
            layers=self._share.layers,
            groups=self._share.groups,
            timeout_s=self._timeout_s,
            ended_early=early,
            on_end=self._load_ended,
        )

    def _load_ended(self, load: Load, result: LoadResult) -> None:
        lease = load.lease
        lease.end_load(load)
        for lease_id in lease.ids if load.is_begun else ():
            self._link.unuse_lease(lease_id)
        self._counters.count_load(lease.tiers[load.first_chunk : result.chunks].tobytes(), result)
        if result.reason == "checksum" and lease.session is not None:
            self._report_corrupt(lease.session, m.ReportCorrupt(*lease.place_of(result.chunks)))

    def _report_corrupt(self, session: Session, report: m.ReportCorrupt) -> None:
        """Have the daemon check the chunk before the failure is returned, so that no client gets it again."""
        try:
            failpoint.reach("client.report_corrupt.before", failpoint.unreachable)
            session.call(report, m.Done)
        except KVPoolError as error:
            self._link.note_failure(session, error)
