"""Beginning of a load: hands leased chunks to the native threads, group by group, to copy them or to check them where they lie.

The Pool has checked the arguments. Every failure of the daemon gives a load that ends with nothing. Any thread.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.layout import Layout
from kvpool.protocol.records import messages as m
from kvpool.states import LoadReason
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.connection.session import Session
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.verbs.lease import LeaseHold
from kvpool_client.verbs.leased_rows import LeasedRows
from kvpool_client.verbs.load import BegunLoad, Load, LoadedRun
from kvpool_client.verbs.results import LoadResult
from kvpool_client.verbs.set_hold import SetHold
from kvpool_client.verbs.set_load import SetLoad


class LoadStarter:
    """Starts the loads of one Pool."""

    def __init__(
        self, layout: Layout, link: Link, copies: Sequence[Copies], counters: Counters, *, timeout_s: float
    ) -> None:
        """`copies`: of each group; a layout without groups is one."""
        self._layout = layout
        self._has_windows = not all(part.is_chained for part in layout.group_layouts)
        self._link = link
        self._copies = copies
        self._counters = counters
        self._timeout_s = timeout_s

    def begin_load(
        self,
        lease: LeaseHold,
        first_chunk: int,
        rows: Sequence[LeasedRows],
        blocks: Sequence[EngineBlocks | None],
    ) -> Load:
        """A load of a lease's chunks from `first_chunk` on. `rows`: of each group, see `LeaseHold.rows_from`; `blocks`: where
        they go, None to compare them with their checksums where they lie."""
        return self._begin(lease, first_chunk, copies=self._copies, rows=rows, blocks=blocks)

    def begin_set(
        self, lease: SetHold, wanted: npt.NDArray[np.bool_], blocks: EngineBlocks, *, may_outlive: bool = False
    ) -> SetLoad:
        """A load of leased keys of a set, bool [keys], into blocks of theirs. `may_outlive`: see `Pool.load_set`."""
        copies, rows = [self._copies[lease.group]], [lease.rows_of(wanted)]
        load = self._begin(lease, 0, copies=copies, rows=rows, blocks=[blocks], wanted=wanted, may_outlive=may_outlive)
        assert isinstance(load, SetLoad)
        return load

    def _begin(
        self,
        lease: LeaseHold,
        first_chunk: int,
        *,
        copies: Sequence[Copies],
        rows: Sequence[LeasedRows],
        blocks: Sequence[EngineBlocks | None],
        wanted: npt.NDArray[np.bool_] | None = None,
        may_outlive: bool = False,
    ) -> Load:
        session = lease.session
        is_live = session is not None and (
            lease.is_live or (may_outlive and not lease.is_released and not lease.is_inherited)
        )
        # Else the lease was released, or the session has ended.
        reason = LoadReason.GONE if session is not None and session.is_alive else LoadReason.DISCONNECTED
        if is_live and any(map(len, rows)):
            failpoint.reach("client.load.before")
        is_set = wanted is not None
        begun = BegunLoad(
            lease,
            [
                self._loaded_run(session if is_live else None, *of_group, early=reason, is_set=is_set)
                for of_group in zip(copies, rows, blocks, strict=True)
            ],
            first_chunk,
            lease.chunks,
            chunk_tokens=self._layout.chunk_tokens,
            has_groups=bool(self._layout.groups) and not is_set,
            has_windows=self._has_windows and not is_set,
            timeout_s=self._timeout_s,
            on_end=self._load_ended,
            first_group=lease.group if isinstance(lease, SetHold) else 0,
        )
        load = SetLoad(begun, lease.held, wanted) if wanted is not None else Load(begun)
        if load.is_begun:
            if not lease.begin_load(load):
                load.cancel()
            if lease.session is not None:
                self._link.use_lease(lease.session, lease.id, lease.renewal)
        return load

    def begin_check(self, lease: LeaseHold, first_chunk: int) -> Load:
        """A load of leased chunks from `first_chunk` on that copies nothing: it compares their KV with its checksums where it
        lies."""
        rows = lease.rows_from(first_chunk)
        return self.begin_load(lease, first_chunk, rows, [None] * len(rows))

    def estimate_s(self, chunks: int) -> float:
        """Seconds to load what a hit of so many chunks needs."""
        return sum(
            copies.estimate_s(part.chunks_of(chunks))
            for part, copies in zip(self._layout.group_layouts, self._copies, strict=True)
        )

    @staticmethod
    def _loaded_run(
        session: Session | None,
        copies: Copies,
        rows: LeasedRows,
        blocks: EngineBlocks | None,
        *,
        early: LoadReason,
        is_set: bool,
    ) -> LoadedRun:
        """A run that copies the rows of one group; without a session one that has ended for the reason `early`."""
        run, reason = None, early if len(rows) else LoadReason.COMPLETE
        if session is not None and len(rows):
            run = (
                copies.load(session, rows, blocks, is_set=is_set) if blocks is not None else copies.check(session, rows)
            )
            reason = LoadReason.COMPLETE if run is not None else LoadReason.GONE
        return LoadedRun(rows, copies.share.layers, copies.share.groups, run, reason)

    def _load_ended(self, load: Load, result: LoadResult) -> None:
        lease = load.lease
        session = lease.session
        lease.end_load(load)
        if load.is_begun and session is not None:
            self._link.unuse_lease(session, lease.id)
        self._counters.count_load(load.loaded_levels(), result)
        if session is not None and result.reason != "complete":
            for place in load.corrupt_places():
                self._report_corrupt(session, m.ReportCorrupt(*place))

    def _report_corrupt(self, session: Session, report: m.ReportCorrupt) -> None:
        """Have the daemon check the chunk before the failure is returned, so that no client gets it again."""
        try:
            failpoint.reach("client.report_corrupt.before", failpoint.unreachable)
            session.call(report, m.Done)
        except KVPoolError as error:
            self._link.note_failure(session, error)
