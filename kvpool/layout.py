"""Layout: the geometry of a chunk and its fingerprint.

A Layout defines how many bytes a chunk has and how they are divided, and not where an engine has them (that is
`kvpool_client.copying.buffers`). Invariant: two Layouts with the same fingerprint store the same bytes for the same KV.
Immutable; any thread.
"""

import struct
from dataclasses import dataclass, replace

from kvpool.errors import InvalidArgument, LayoutMismatch

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
LAYERS_MAX = 1024
WORLD_MAX = 1024
STAGES_MAX = 64
CHUNK_BYTES_MAX = 4 << 30
_FINGERPRINT_VERSION = 1
_FIELDS = 10
# A Layout's fields as they travel and are stored.
WireLayout = list[int | str | list[int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry of one chunk on one rank.

    `layers` × `planes` (2 for K and V, 1 for MLA) × `chunk_tokens` × `kv_heads` (on this rank) × `head_dim`
    items of `dtype`. `format` and `block_tokens` declare a packed engine layout: a block's bytes are opaque
    and chunks are shared only between engines that declare the same two. `rank=None` is a scheduler's
    layout: it stands for all ranks of `world`. `stages`: the layers of each pipeline stage, where the ranks of
    `world` are those of one stage after the other; `layers` is then that of this rank's stage, and in a
    scheduler's layout that of the longest.

    Raises InvalidArgument, naming the field, its value and what was expected.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    chunk_tokens: int = 256
    planes: int = 2
    rank: int | None = 0
    world: int = 1
    format: str = ""
    block_tokens: int | None = None
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_count("layers", self.layers, LAYERS_MAX)
        _check_count("kv_heads", self.kv_heads, 65536)
        _check_count("head_dim", self.head_dim, 65536)
        _check_count("chunk_tokens", self.chunk_tokens, 1 << 20)
        _check_count("planes", self.planes, 2)
        _check_count("world", self.world, WORLD_MAX)
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument(f"layout dtype is {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        rank_fits = self.rank is None or (_is_count(self.rank) and 0 <= self.rank < self.world)
        if not rank_fits:
            raise InvalidArgument(f"layout rank is {self.rank!r}, expected None or 0..{self.world - 1}")
        if not isinstance(self.format, str) or len(self.format.encode()) > 256:
            raise InvalidArgument(f"layout format is {self.format!r}, expected a string of at most 256 bytes")
        self._check_blocks()
        self._check_stages()
        if self.chunk_bytes > CHUNK_BYTES_MAX:
            raise InvalidArgument(
                f"layout makes chunks of {self.chunk_bytes} bytes, expected at most {CHUNK_BYTES_MAX}"
            )

    def _check_blocks(self) -> None:
        if self.block_tokens is None:
            if self.format:
                raise InvalidArgument(f"layout format is {self.format!r} without block_tokens, expected both")
            return
        _check_count("block_tokens", self.block_tokens, self.chunk_tokens)
        if self.chunk_tokens % self.block_tokens:
            raise InvalidArgument(
                f"layout block_tokens is {self.block_tokens}, expected a divisor of chunk_tokens {self.chunk_tokens}"
            )

    def _check_stages(self) -> None:
        if self.stages == ():
            return
        if not isinstance(self.stages, tuple) or not 2 <= len(self.stages) <= STAGES_MAX:
            raise InvalidArgument(
                f"layout stages is {self.stages!r}, expected a tuple of 2..{STAGES_MAX} numbers of layers"
            )
        for layers in self.stages:
            _check_count("stages", layers, LAYERS_MAX)
        if self.world % len(self.stages):
            raise InvalidArgument(f"layout world is {self.world}, expected a multiple of its {len(self.stages)} stages")
        if self.layers != self._layers_of(self.rank):
            raise InvalidArgument(
                f"layout layers is {self.layers} of rank {self.rank}, expected {self._layers_of(self.rank)} by its stages"
            )

    def _layers_of(self, rank: int | None) -> int:
        return max(self.stages) if rank is None else self.stages[rank * len(self.stages) // self.world]

    @property
    def token_plane_bytes(self) -> int:
        """Bytes of one token in one plane of one layer."""
        return self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a chunk: one extent."""
        return self.planes * self.chunk_tokens * self.token_plane_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk, layer-major."""
        return self.layers * self.layer_bytes

    @property
    def is_packed(self) -> bool:
        """Whether the engine's blocks are opaque bytes."""
        return self.block_tokens is not None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this layout stands for."""
        return tuple(range(self.world)) if self.rank is None else (self.rank,)

    def for_rank(self, rank: int) -> "Layout":
        """The layout of one rank."""
        return replace(self, rank=rank, layers=self._layers_of(rank) if self.stages else self.layers)

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field: fixed-width numbers, length-prefixed strings, a version in front.

        Stages come after all others, and only where there are any.
        """
        assert self.rank is not None, "a scheduler's layout has one fingerprint for each rank"
        numbers = (
            _FINGERPRINT_VERSION,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.chunk_tokens,
            self.planes,
            self.rank,
            self.world,
            self.block_tokens or 0,
        )
        dtype, name = self.dtype.encode(), self.format.encode()
        return struct.pack("<9I", *numbers) + _prefixed(dtype) + _prefixed(name) + self._stage_bytes()

    def _stage_bytes(self) -> bytes:
        counted = (len(self.stages), *self.stages) if self.stages else ()
        return struct.pack(f"<{len(counted)}I", *counted)

    def to_wire(self) -> WireLayout:
        """The fields as the handshake carries them; rank -1 stands for a scheduler; no stages, no last field."""
        fields: WireLayout = [
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.chunk_tokens,
            self.planes,
            -1 if self.rank is None else self.rank,
            self.world,
            self.format,
            self.block_tokens or 0,
        ]
        return [*fields, list(self.stages)] if self.stages else fields

    @classmethod
    def from_wire(cls, fields: object) -> "Layout":
        """The layout that a peer sent. Raises LayoutMismatch on anything but valid fields."""
        if not isinstance(fields, list) or len(fields) not in (_FIELDS, _FIELDS + 1):
            raise LayoutMismatch(
                f"layout in the handshake is not a list of {_FIELDS} fields, or {_FIELDS + 1} with stages"
            )
        layers, kv_heads, head_dim, dtype, chunk_tokens, planes, rank, world, name, block_tokens = fields[:_FIELDS]
        stages = fields[_FIELDS] if len(fields) > _FIELDS else []
        if not isinstance(stages, list) or not (stages or len(fields) == _FIELDS):
            raise LayoutMismatch("layout in the handshake has stages that are no list of numbers of layers")
        numbers = (layers, kv_heads, head_dim, chunk_tokens, planes, rank, world, block_tokens)
        if not all(_is_count(number) for number in numbers):
            raise LayoutMismatch("layout in the handshake has a field that should be an integer and is none")
        if not isinstance(dtype, str) or not isinstance(name, str):
            raise LayoutMismatch("layout in the handshake has a dtype or format that is no string")
        try:
            return cls(
                layers=layers,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                chunk_tokens=chunk_tokens,
                planes=planes,
                rank=None if rank == -1 else rank,
                world=world,
                format=name,
                block_tokens=block_tokens or None,
                stages=tuple(stages),
            )
        except InvalidArgument as error:
            raise LayoutMismatch(str(error)) from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: int, most: int) -> None:
    if not _is_count(value) or not 1 <= value <= most:
        raise InvalidArgument(f"layout {name} is {value!r}, expected an integer 1..{most}")


def _prefixed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
