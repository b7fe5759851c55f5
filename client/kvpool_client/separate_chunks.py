"""Chunks without a parent, many at once: each chain has a lease or a save of its own, and all share the round trips.

For engines that name a page by everything before it (SGLang), and may request pages from the middle of a prompt. Two round
trips save any number of chunks, one leases them, one native job loads them, and looking them up and releasing them takes no
round trip. These are the verbs of a Pool over several chains: the daemon's hold on one goes from parent to child, and a
reservation is committed in the order in which it got its slots, while here the first chunks get slots first and are committed
last, so that they are evicted last. A Pool has one. Any thread.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvpool.errors import InvalidArgument
from kvpool.states import TokenRange
from kvpool_client.arguments import check_hit, check_keys, check_lease
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.copies import Copies
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.retention import plan_retention
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease import Lease, release_each
from kvpool_client.verbs.lease_fetcher import LeaseFetcher
from kvpool_client.verbs.leased_rows import LeasedRows
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.load_starter import LoadStarter
from kvpool_client.verbs.results import Hit, SaveResult
from kvpool_client.verbs.save import Save, publish_each
from kvpool_client.verbs.save_starter import SaveStarter


class SeparateChunks:
    """See the module; `Pool.separate`."""

    def __init__(
        self,
        namespace: Namespace,
        copies: Copies,
        *,
        finder: Finder,
        lease_fetcher: LeaseFetcher,
        load_starter: LoadStarter,
        save_starter: SaveStarter,
    ) -> None:
        self._namespace = namespace
        self._copies = copies
        self._finder = finder
        self._lease_fetcher = lease_fetcher
        self._load_starter = load_starter
        self._save_starter = save_starter

    def lookup(self, chains: Sequence[KeyChain]) -> list[Hit]:
        """The hits of leading chains of which this node has every chunk; others `Pool.lookup` may find elsewhere. No request.
        Raises InvalidArgument for another Pool's keys."""
        for keys in chains:
            check_keys(keys, self._namespace)
        return self._finder.lookup_each(chains)

    def find_to_load(self, chains: Sequence[KeyChain]) -> Iterator[Hit]:
        """The hits of chains that `lookup` was called for before, one for each chain, empty ones too: first those of which this
        node has every chunk, then, made on demand, what is found elsewhere. They count as no further lookup. Raises
        InvalidArgument for another Pool's keys."""
        for keys in chains:
            check_keys(keys, self._namespace)
        here = self._finder.lookup_each(chains, is_counted=False)
        yield from here
        for keys in chains[len(here) :]:
            yield self._finder.lookup(keys, is_counted=False)

    def acquire(self, hits: Sequence[Hit]) -> list[Lease]:
        """A lease for each hit, as `Pool.acquire` gives it. Where there is no room for all, the first ones get it. Raises
        InvalidArgument for another Pool's hit."""
        for hit in hits:
            check_hit(hit, self._namespace)
        return self._lease_fetcher.acquire_each(hits)

    def load(self, leases: Sequence[Lease], cache: Cache, block_ids: Sequence[Sequence[int]]) -> Load:
        """Copy the chunks of leases that one `acquire` answered, up to the first lease that has none, into host memory, as
        `Pool.load` does; returns at once. `block_ids`: of each lease's chunks.

        The load counts the chunks of all the leases, one lease's behind another's. Each lease's release waits for it. Raises
        InvalidArgument as `Pool.load` does, and for a cache of device memory.
        """
        if not leases:
            raise InvalidArgument("leases are none, expected one or more")
        for lease in leases:
            check_lease(lease, self._namespace)
        if isinstance(cache, Cache) and cache.side is not None:
            raise InvalidArgument(
                f"cache is {cache!r} on a device, expected one in host memory, or Pool.load for each lease"
            )
        first = leases[0].hold
        held = tuple(
            takewhile(lambda hold: hold.chunks and hold.session is first.session, (one.hold for one in leases))
        )
        rows = LeasedRows.joined([hold.rows for hold in held or [first]])
        ids = [block for of_lease, _ in zip(block_ids, held, strict=False) for block in of_lease]
        blocks = self._copies.blocks(cache, ids, None, chunks=len(rows), is_load=True)
        return self._load_starter.begin_load(held or (first,), 0, [rows], [blocks])

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases, after their running loads. What is released last counts as used last. Idempotent; never raises."""
        release_each([lease.hold for lease in leases])

    def save(
        self,
        chains: Sequence[KeyChain],
        cache: Cache,
        block_ids: Sequence[Sequence[int]],
        retention: Sequence[Sequence[TokenRange]],
    ) -> list[Save]:
        """A save of every chunk of each chain, as `Pool.save` begins it, out of its blocks of `cache`. Raises
        InvalidArgument."""
        planned, chunk_tokens = [], self._namespace.layout.chunk_tokens
        for chain, ids, ranges in zip(chains, block_ids, retention, strict=True):
            check_keys(chain, self._namespace)
            retention_columns = plan_retention(ranges, chunks=len(chain), chunk_tokens=chunk_tokens)
            blocks = self._copies.blocks(cache, ids, None, chunks=len(chain), is_load=False)
            planned.append(self._save_starter.plan(chain, retention_columns, [range(len(chain))], [blocks]))
        return self._save_starter.begin_save(planned)

    def publish(self, saves: Sequence[Save]) -> list[SaveResult]:
        """Copy and publish saves, in their order. The result of each."""
        return publish_each(saves)
