"""Group verbs: saves and loads of a Pool whose layout has groups, with the engine's memory given by group.

For each group either a Cache (`Pool.register` with `group`) and block ids, or a contiguous uint8 array [chunks, chunk_bytes] of
the group's own layout. A Pool has one. Any thread.
"""

from collections.abc import Sequence

from kvpool.errors import InvalidArgument
from kvpool.types import TokenRange
from kvpool_client.arguments import as_index, check_keys, check_lease
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import Link
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.copies import Copies, EngineBlocks
from kvpool_client.grouped.leases import GroupLease
from kvpool_client.grouped.load import GroupLoad
from kvpool_client.grouped.lookups import GroupFinder, GroupHit
from kvpool_client.key_chain import KeyChain, Namespace
from kvpool_client.retention import plan_retention
from kvpool_client.verbs.chosen_chunks import checked_chunks, chunks_to_save
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.lease_bound import chunks_held
from kvpool_client.verbs.load_starter import LoadStarter
from kvpool_client.verbs.results import LoadResult
from kvpool_client.verbs.save import Save
from kvpool_client.verbs.save_starter import RunPlan, SavePlan, SaveStarter


class GroupVerbs:
    """See the module; `Pool.groups`."""

    def __init__(
        self,
        namespace: Namespace,
        link: Link,
        *,
        copies: Copies,
        finder: GroupFinder | None,
        counters: Counters,
        timeout_s: float,
    ) -> None:
        self._namespace = namespace
        self._layout = layout = namespace.layout
        self._link = link
        self._finder = finder
        self._counters = counters
        self._chunks_held = chunks_held(layout, layout.world)  # by a scheduler's lease, which is of all ranks
        parts = enumerate(layout.group_layouts if layout.groups else ())
        self._parts = [(part, copies.of_group(index)) for index, part in parts]
        # A load of all groups counts once, by its result.
        self._loads = [
            LoadStarter(part, own.share, link=link, copies=own, counters=Counters(), timeout_s=timeout_s)
            for part, own in self._parts
        ]
        self._layers = [own.share.layers for _, own in self._parts]
        layouts, sides = zip(*self._parts, strict=True) if self._parts else ((layout,), (copies,))
        self._save_starter = SaveStarter(layouts, link, sides, counters, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<GroupVerbs of {len(self._parts)} groups>"

    @property
    def chunks_max(self) -> int:
        """The most chunks that a hit has: those that one request names and one lease holds."""
        self._check()
        assert self._finder is not None
        return self._finder.chunks_max

    def lookup(self, keys: KeyChain, chunks_max: int, *, is_counted: bool = True) -> GroupHit:
        """The longest hit of `chunks_max` chunks at most: an engine that computes the last token again goes on before it.
        `is_counted`: as for `Pool.lookup`."""
        self._check()
        check_keys(keys, self._namespace)
        chunks_max = as_index("chunks_max", chunks_max, len(keys))
        assert self._finder is not None
        return self._finder.lookup(keys, chunks_max, is_counted=is_counted)

    def chunks_to_save(
        self, keys: KeyChain, first_chunk: int = 0, chunks: int | None = None, boundaries: Sequence[int] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """The chunks of each group that `save` stores with these arguments: those whose blocks it is to be given."""
        self._check()
        check_keys(keys, self._namespace)
        first_chunk = as_index("first_chunk", first_chunk, len(keys))
        count = len(keys) - first_chunk if chunks is None else chunks
        count = as_index("chunks", count, len(keys) - first_chunk)
        return chunks_to_save(
            self._layout,
            keys,
            first_chunk=first_chunk,
            end=first_chunk + count,
            boundaries=boundaries,
            held=self._chunks_held,
        )

    def save(
        self,
        keys: KeyChain,
        caches: Sequence[Cache] | None = None,
        block_ids: Sequence[object] | None = None,
        *,
        first_chunk: int = 0,
        chunks: int | None = None,
        boundaries: Sequence[int] | None = None,
        chosen: Sequence[Sequence[int]] | None = None,
        retention: Sequence[TokenRange] = (),
        prompt_tokens: int | None = None,
        decode_priority: int | None = None,
        decode_duration_s: float | None = None,
        from_: Sequence[object] | None = None,
    ) -> Save:
        """Reserve slots for chunks `first_chunk` up to `first_chunk + chunks` of the full groups, and for those of windows and
        states before each of the `boundaries`, and copy; see `Pool.save`. One round trip, and one to commit.

        `block_ids` or `from_`: of the chunks that `chunks_to_save` names for each group, in its order. `chosen`: the chunks of
        each group in place of those three arguments, for an engine that stores each chunk when it has computed it: of a full
        group numbers in a row, of others any ascending ones.
        """
        named = self.chunks_to_save(keys, first_chunk, chunks, boundaries) if chosen is None else ()
        if chosen is not None:
            if first_chunk or chunks is not None or boundaries is not None:
                raise InvalidArgument("expected chosen without first_chunk, chunks and boundaries")
            self._check()
            check_keys(keys, self._namespace)
            named = checked_chunks(chosen, self._layout, len(keys))
        retained = plan_retention(
            retention,
            chunks=len(keys),
            chunk_tokens=self._layout.chunk_tokens,
            prompt_tokens=prompt_tokens,
            decode_priority=decode_priority,
            decode_duration_s=decode_duration_s,
        )
        blocks = self._blocks(caches, block_ids, from_, [len(of_group) for of_group in named], is_load=False)
        runs = [
            RunPlan(group, of_chunks, of_group, is_chain=self._is_full(group))
            for group, (of_chunks, of_group) in enumerate(zip(named, blocks, strict=True))
        ]
        # Windows and states first: they are few, and without them the others are no hit.
        runs.sort(key=lambda run: run.is_chain)
        end = max((run.chunks[-1] + 1 for run in runs if len(run.chunks)), default=first_chunk)
        return self._save_starter.begin(SavePlan(keys, retained, runs, end_chunk=end))

    def load(
        self,
        lease: Lease,
        caches: Sequence[Cache] | None = None,
        block_ids: Sequence[object] | None = None,
        *,
        first_chunk: int = 0,
        into: Sequence[object] | None = None,
    ) -> GroupLoad:
        """Copy leased chunks into engine memory: of full groups from `first_chunk` on, of windows and states all that
        `lease.ranges` names; returns at once. `block_ids` or `into`: of these chunks; −1 skips a block."""
        self._check()
        check_lease(lease, self._namespace)
        assert isinstance(lease, GroupLease)
        first_chunk = as_index("first_chunk", first_chunk, lease.chunks)
        firsts = [min(first_chunk, len(chunks)) if self._is_full(at) else 0 for at, chunks in enumerate(lease.ranges)]
        counts = [len(chunks) - first for chunks, first in zip(lease.ranges, firsts, strict=True)]
        blocks = self._blocks(caches, block_ids, into, counts, is_load=True)
        loads = [
            starter.begin(lease.hold.rows_of(group), first, of_group)
            for group, (starter, first, of_group) in enumerate(zip(self._loads, firsts, blocks, strict=True))
        ]
        return GroupLoad(lease, loads, self._layers, first_chunk=first_chunk, on_end=self._load_ended)

    def estimate_s(self, chunks: int) -> float:
        """Seconds to load what a hit of so many chunks needs of each group."""
        return sum(
            copies.estimate_s(part.group.chunks_of(chunks, part.chunk_tokens))
            for part, copies in self._parts
            if part.group is not None
        )

    def _check(self) -> None:
        if not self._parts:
            raise InvalidArgument("this Pool's layout has no groups: use its own save and load")

    def _is_full(self, group: int) -> bool:
        role = self._parts[group][0].group
        return role is not None and role.is_full

    def _blocks(
        self,
        caches: Sequence[Cache] | None,
        block_ids: Sequence[object] | None,
        arrays: Sequence[object] | None,
        counts: Sequence[int],
        *,
        is_load: bool,
    ) -> list[EngineBlocks]:
        groups = len(self._parts)
        for name, given in (("caches", caches), ("block_ids", block_ids), ("the arrays", arrays)):
            if given is not None and (not isinstance(given, Sequence) or len(given) != groups):
                raise InvalidArgument(f"{name} are {type(given).__name__}, expected a sequence of {groups}, by group")
        if (caches is None) == (arrays is None) or (caches is None) != (block_ids is None):
            raise InvalidArgument("expected either caches and block_ids, or one contiguous array for each group")
        return [
            copies.blocks(
                caches[group] if caches is not None else None,
                block_ids[group] if block_ids is not None else None,
                array=arrays[group] if arrays is not None else None,
                chunks=counts[group],
                is_load=is_load,
            )
            for group, (_, copies) in enumerate(self._parts)
        ]

    def _load_ended(self, lease: GroupLease, result: LoadResult) -> None:
        self._counters.count_load(lease.tiers[: result.chunks].tobytes(), result)
