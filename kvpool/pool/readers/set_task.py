"""Set task: holds on chunks of a group, each alone, part by part: what DRAM has first, then what other tiers and nodes have.

What is not stored, not allowed, or has no room is left out; nothing waits for all of the set. Control thread only; `now_ns` is
an argument.

Invariant: `_held` has a hold on each rank for each key that is held; they count for the holder.
"""

from collections.abc import Iterator
from itertools import chain
from typing import cast

import kvpool_native
from kvpool.ids import ConnectionId, HoldId
from kvpool.index.parts import Step, part_chunks
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.pool.readers.chain_holds import ChainHolds
from kvpool.pool.readers.ending_holds import EndingHolds
from kvpool.tiering.tiering import Tiering

# Chunks that DRAM has not which are looked for in one part of a request: about half a millisecond.
SOUGHT_AT_ONCE = 16


class SetTask:
    """See the module. `session`: the group's; `keys`: of one rank after those of another."""

    def __init__(
        self,
        directory: kvpool_native.Directory,
        tiering: Tiering,
        session: EngineSession,
        keys: KeyColumn,
        *,
        ending: EndingHolds,
    ) -> None:
        """`ending`: where what it releases goes."""
        self._directory = directory
        self._tiering = tiering
        self._session = session
        self._holder: ConnectionId = session.holder
        self._ending = ending
        self._columns = keys.by_rank(len(session.namespace_ids))
        self.count = len(self._columns[0])
        self._held: dict[int, list[HoldId]] = {}
        # What is named twice counts where it is named first.
        places = {key: place for place, key in reversed(list(enumerate(self._columns[0])))}
        self._unasked = sorted(places.values())
        self._missing: list[int] = []
        self._begun: ChainHolds | None = None  # of the first one that is missing

    def __repr__(self) -> str:
        return f"<SetTask {len(self._held)} of {self.count} chunks>"

    @property
    def holds(self) -> list[HoldId]:
        """All holds that it has."""
        begun = self._begun.holds if self._begun is not None else []
        return [*chain.from_iterable(self._held.values()), *begun]

    def advance(self, now_ns: int) -> Step:
        """Hold the next part. WAIT where DRAM has no room for one of them now; DONE where all have been looked for."""
        if self._unasked:
            self._hold_in_dram(part_chunks(len(self._columns)), now_ns)
            return Step.MORE if self._unasked or self._missing else Step.DONE
        for _ in range(SOUGHT_AT_ONCE):
            if not self._missing:
                return Step.DONE
            if self._begun is None:
                self._begun = self._sought(self._missing[0])
            step = self._begun.advance(now_ns)
            if step is Step.WAIT:
                return step
            if step is Step.DONE:
                self._keep_begun(now_ns)
        return Step.MORE if self._missing else Step.DONE

    def take_holds(self) -> tuple[dict[int, list[HoldId]], list[int]]:
        """On each rank one hold on all that is held, which belongs to the caller from now on, and which of the keys its chunks
        are, in its order: of a full group the first key comes last. REQUIRES: only `release_holds` follows."""
        whole = [place for place, holds in sorted(self._held.items()) if min(self._directory.count_whole(holds))]
        if self._session.layout.is_chained:
            whole.reverse()
        if not whole:
            return {}, []
        found = {}
        for at, rank in enumerate(self._session.layout.ranks):
            of_rank = [self._held[place][at] for place in whole]
            found[rank] = [HoldId(self._directory.join_holds(of_rank)) if len(of_rank) > 1 else of_rank[0]]
        for place in whole:
            del self._held[place]
        return found, whole

    def release_holds(self, now_ns: int) -> None:
        """Release the remaining holds, a bounded number at once."""
        if self._begun is not None:
            self._begun.release_holds(now_ns)
            self._begun = None
        self._ending.release_holds(list(chain.from_iterable(self._held.values())), now_ns)
        self._held = {}

    def _hold_in_dram(self, most: int, now_ns: int) -> None:
        owners = self._session.namespace_ids
        for place in self._unasked[:most]:
            key = b"".join(self._keys(place))
            holds = cast("list[HoldId]", self._directory.hold_chain(owners, key, 1, self._holder, now_ns))
            if holds:
                self._held[place] = holds
            else:
                self._missing.append(place)
        del self._unasked[:most]

    def _sought(self, place: int) -> ChainHolds:
        return ChainHolds(
            self._directory, self._tiering, self._session, KeyColumn.of(self._keys(place)), holder=self._holder
        )

    def _keep_begun(self, now_ns: int) -> None:
        """Take over what was found of the first one that is missing."""
        place, begun = self._missing.pop(0), self._begun
        assert begun is not None
        self._begun = None
        classes = self._session.size_classes
        if begun.chunks and self._directory.affordable(self._holder, begun.holds, classes, 1):
            self._held[place] = begun.take_holds()
            self._directory.charge(self._held[place], self._holder)
        else:
            begun.release_holds(now_ns)

    def _keys(self, place: int) -> Iterator[bytes]:
        """The key of a chunk on each rank."""
        return (column[place] for column in self._columns)
