"""Engine memory: this rank's Pool with the engine's registered KV, part by part. Any thread."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvpool_client.key_chain import KeyChain
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.verbs.save import Save
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.plan import LoadOrder, SaveRetention
from kvpool_client.vllm.surface import Tensor
from kvpool_client.vllm.worker.tensor_views import block_views

Each = TypeVar("Each")
NO_RETENTION = SaveRetention((), 0)


class EngineMemory:
    """See the module."""

    def __init__(self, pool: Pool, geometry: Geometry, tensors: Mapping[str, Tensor], *, rank: int) -> None:
        """Raises LayoutMismatch for tensors that are not the geometry's."""
        self.pool = pool
        self.geometry = geometry
        self.is_writer_of = [geometry.is_writer_of(part, rank) for part in geometry.parts]
        self.caches = [
            pool.register(
                block_views(geometry, part, tensors),
                block_tokens=geometry.chunk_tokens if part.is_state else part.block_tokens,
                group=number,
            )
            for number, part in enumerate(geometry.parts)
        ]

    def __repr__(self) -> str:
        return f"<EngineMemory of {len(self.caches)} parts, {self.pool!r}>"

    def load(self, lease: Lease, order: LoadOrder) -> Load:
        """Begin to load what is ordered."""
        caches, block_ids = self._of_layout(self.caches), self._of_layout(order.block_ids)
        return self.pool.load(lease, caches, block_ids, first_chunk=order.first_chunk)

    def save(
        self,
        keys: KeyChain,
        chunks: Sequence[Sequence[int]],
        block_ids: Sequence[Sequence[int]],
        retention: SaveRetention | None,
    ) -> Save:
        """Begin to save these chunks of each part, out of these blocks."""
        retention = retention or NO_RETENTION
        return self.pool.save(
            keys,
            self._of_layout(self.caches),
            self._of_layout(block_ids),
            chosen=chunks,
            retention=retention.ranges,
            prompt_tokens=retention.prompt_tokens,
            decode_priority=retention.decode_priority,
            decode_duration_s=retention.decode_duration_s,
        )

    def engine_mark(self) -> Callable[[], None]:
        """A call that waits for everything the engine has queued so far; the parts are on one device."""
        return self.caches[0].engine_mark()

    def _of_layout(self, by_part: Sequence[Each]) -> Sequence[Each] | Each:
        """What a Pool's verbs take: of a layout without groups the one entry itself."""
        return by_part if self.geometry.layout.groups else by_part[0]
