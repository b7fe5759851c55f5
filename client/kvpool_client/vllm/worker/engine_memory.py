"""Engine memory: this rank's Pool with the engine's registered KV, of a layout with groups or without. Any thread."""

from collections.abc import Callable, Mapping

from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.plan import LoadOrder
from kvpool_client.vllm.surface import Tensor
from kvpool_client.vllm.worker.tensor_views import block_views


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
        if self.geometry.has_groups:
            return self.pool.load(lease, self.caches, order.block_ids, first_chunk=order.first_chunk)
        return self.pool.load(lease, self.caches[0], order.block_ids[0], first_chunk=order.first_chunk)

    def engine_mark(self) -> Callable[[], None]:
        """A call that waits for everything the engine has queued so far; the parts are on one device."""
        return self.caches[0].engine_mark()
