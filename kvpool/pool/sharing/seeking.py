"""Seeking: engines' questions for chunks of the shared store, which no table in shared memory has. Control thread only."""

from typing import TYPE_CHECKING

from kvpool.index.sessions import EngineSession
from kvpool.protocol import columns
from kvpool.protocol.records import seeking as sk
from kvpool.protocol.verbs import ENGINE, verb

if TYPE_CHECKING:
    from kvpool.tiers.store.tier import StoreTier


class Seeking:
    """See the module. `store` None: there is none, and nothing is found."""

    def __init__(self, store: "StoreTier | None", remember_s: float) -> None:
        self._store = store
        self._remember_s = remember_s

    def __repr__(self) -> str:
        return f"<Seeking in {self._store!r}>"

    @verb(sk.Seek, roles=ENGINE)
    async def seek(self, session: EngineSession, request: sk.Seek) -> sk.Sought:
        """Which of these chunks the store has, of every group and rank."""
        namespaces = session.namespaces.values()
        keys = columns.keys_of_each(request.counts, request.keys, namespaces=len(namespaces), keys_max=sk.SEEK_KEYS_MAX)
        if self._store is None or session.is_peer or not request.timeout_s > 0:
            return sk.Sought(bytes(sum(len(column) for column in keys)), self._remember_s)
        there = await self._store.find_readable(
            list(zip(namespaces, keys, strict=True)), request.timeout_s, are_alone=request.are_alone
        )
        return sk.Sought(there, self._remember_s)
