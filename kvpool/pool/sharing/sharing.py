"""Sharing: the store that nodes share, as a pool uses it: what is published there, and what engines seek in it.

Without a store it is the null object: nothing is published, nothing is found. Control thread only.
"""

from typing import TYPE_CHECKING, cast

from kvpool.clock import Clock
from kvpool.config.store_options import StoreConfig
from kvpool.index.leases import Lease
from kvpool.index.namespaces import Namespaces
from kvpool.index.sessions import EngineSession
from kvpool.journal.journal import Journal
from kvpool.pool.readers.readers import Taken, namespaces_of
from kvpool.pool.sharing.seeking import Seeking
from kvpool.states import Level
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import ArenaTier

if TYPE_CHECKING:
    from kvpool.pool.sharing.publications import Publications
    from kvpool.tiers.store.tier import StoreTier


class Sharing:
    """See the module."""

    def __init__(
        self,
        config: StoreConfig,
        arena: ArenaTier,
        tiering: Tiering,
        *,
        namespaces: Namespaces,
        journal: Journal,
        clock: Clock,
    ) -> None:
        store = next((link.tier for link in tiering.remotes if link.tier.level == Level.STORE), None)
        store = cast("StoreTier | None", store)
        self.publications: list[Publications] = []
        self.has_store = store is not None
        self.seeking = Seeking(store, config.miss_ttl)
        if store is not None:
            from kvpool.pool.sharing import publications  # with the library of the store

            made = publications.Publications(
                arena.directory,
                tiering.directories,
                store,
                namespaces=namespaces,
                journal=journal,
                policy=config.publish,
                clock=clock,
            )
            self.publications.append(made)

    def __repr__(self) -> str:
        return f"<Sharing {self.publications}>"

    @property
    def pins(self) -> int:
        """Pins in the arena's directory."""
        return sum(one.pins for one in self.publications)

    def note_lease(self, session: EngineSession, lease: Lease | Taken) -> None:
        """A connection was granted a lease, or tickets."""
        for one in self.publications:
            one.note_lease(namespaces_of(session, lease))
