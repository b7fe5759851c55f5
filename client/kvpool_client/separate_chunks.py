"""Chunks without a parent, many at once: each chain has a lease or a save of its own, and all share the round trips.

For engines that name a page by everything before it (SGLang), and may request pages from the middle of a prompt. Two round
trips save any number of chunks, one leases them, and releasing them takes none. A Pool has one. Any thread.
"""

import contextlib
from collections.abc import Sequence

from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.types import TokenRange
from kvpool_client.arguments import check_keys
from kvpool_client.connection.batching import drop_leases
from kvpool_client.connection.lease_fetcher import LeaseFetcher
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.copies import Copies
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.lease import Lease
from kvpool_client.results import Hit, SaveResult
from kvpool_client.retention import plan_retention
from kvpool_client.save import Save, publish_each
from kvpool_client.save_starter import SavePlan, SaveStarter


class SeparateChunks:
    """See the module; `Pool.separate`."""

    def __init__(
        self, namespace: Namespace, copies: Copies, lease_fetcher: LeaseFetcher, save_starter: SaveStarter
    ) -> None:
        self._namespace = namespace
        self._copies = copies
        self._lease_fetcher = lease_fetcher
        self._save_starter = save_starter

    def acquire(self, hits: Sequence[Hit]) -> list[Lease]:
        """A lease for each hit, as `Pool.acquire` gives it. What is leased last counts as used last. Raises
        InvalidArgument for a hit of another Pool's keys."""
        for hit in hits:
            check_keys(hit.keys, self._namespace)
        return self._lease_fetcher.acquire_each(hits)

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases, after their running loads. Idempotent; never raises."""
        ended = [lease for lease in leases if lease.settle()]
        for session in {lease.session for lease in ended if lease.session is not None}:
            if session.is_alive:
                with contextlib.suppress(KVPoolError):  # the session has ended, and the leases with it
                    failpoint.reach("client.release.before", failpoint.unreachable)
                    drop_leases(session, [lease.id for lease in ended if lease.session is session])

    def save(
        self,
        chains: Sequence[KeyChain],
        cache: Cache,
        block_ids: Sequence[Sequence[int]],
        retention: Sequence[Sequence[TokenRange]],
    ) -> list[Save]:
        """A save of every chunk of each chain, as `Pool.save` begins it, out of its blocks of `cache`. Raises
        InvalidArgument."""
        planned, chunk_tokens = [], self._namespace[1].chunk_tokens
        for chain, ids, ranges in zip(chains, block_ids, retention, strict=True):
            check_keys(chain, self._namespace)
            retention_columns = plan_retention(ranges, chunks=len(chain), chunk_tokens=chunk_tokens)
            blocks = self._copies.blocks(cache, ids, array=None, chunks=len(chain), is_load=False)
            planned.append(SavePlan(chain, blocks, retention_columns, first_chunk=0, count=len(chain)))
        return self._save_starter.begin_each(planned)

    def publish(self, saves: Sequence[Save]) -> list[SaveResult]:
        """Copy and publish saves, in their order. The result of each."""
        return publish_each(saves)
