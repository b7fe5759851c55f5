"""Plan of a step, from the scheduler half to the worker halves; records of plain values that the engine broadcasts.

Nothing here acts. Tokens travel as packed int32, block ids and slots as tuples.
"""

import json
from dataclasses import asdict, dataclass, replace
from math import gcd

from kvpool.layout import Layout

NO_BLOCK = -1
_HEAD_DIM_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy staged chunks `slots` into the engine's blocks `block_ids`. `sequence` rises by one from order to order."""

    sequence: int
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save chunks from `first_chunk` on of the prompt `tokens` from `block_ids`, once this step's layers have run.

    `priorities`: the engine's priority of each of these blocks.
    """

    request_id: int
    tokens: bytes
    salt: bytes
    adapter: str
    first_chunk: int
    block_ids: tuple[int, ...]
    priorities: tuple[int, ...]

    def followed_by(self, later: "SaveOrder") -> "SaveOrder":
        """One order for both; `later` is of the same request and begins where this one ends."""
        assert later.first_chunk == self.first_chunk + len(self.block_ids)
        return replace(
            later,
            first_chunk=self.first_chunk,
            block_ids=self.block_ids + later.block_ids,
            priorities=self.priorities + later.priorities,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `board` and `staging` name shared memory (`staging` is empty until all ranks have posted their geometry).

    `dropped`: requests whose blocks belong to others from this step on; their saves must have ended before it begins.
    """

    board: str
    staging: str
    staging_bytes: int
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV of one rank, as every rank must have it. `is_replicated`: every rank has the same bytes (MLA's latent KV)."""

    layers: int
    planes: int
    token_bytes: int
    tokens_per_block: int
    format: str
    is_replicated: bool

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.planes * self.tokens_per_block * self.token_bytes

    def shards(self, ranks: int) -> int:
        """How many different shards the ranks have between them."""
        return 1 if self.is_replicated else ranks

    def layout(self, rank: int, ranks: int) -> Layout:
        """The Layout of a rank's shard: a block is a chunk of opaque bytes."""
        head_dim = gcd(self.token_bytes, _HEAD_DIM_MAX)
        return Layout(
            layers=self.layers,
            kv_heads=self.token_bytes // head_dim,
            head_dim=head_dim,
            dtype="uint8",
            chunk_tokens=self.tokens_per_block,
            planes=self.planes,
            rank=0 if self.is_replicated else rank,
            world=self.shards(ranks),
            format=self.format,
            block_tokens=self.tokens_per_block,
        )

    def to_bytes(self) -> bytes:
        """The form on the board."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Geometry":
        """The geometry that a rank wrote on the board."""
        return cls(**json.loads(data))
