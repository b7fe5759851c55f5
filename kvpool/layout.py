"""Layout: the geometry of a chunk and its fingerprint.

A Layout defines how many bytes a chunk has and how they are divided, and not where an engine has them (that is
`kvpool_client.copying.buffers`). What the pool stores of a chunk are *extents* of one size, one behind the other: its layers,
or the head groups of each, and, where the layout has summaries, what is filled by these. docs/layouts.md has the
drawings.
Invariant: two Layouts with the same fingerprint store the same bytes for the same KV. Immutable; any thread.
"""

import struct
import sys
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layouts.groups import STATE, Group, GroupRole, checked_groups, entries_of, read_further, role_of, tail_of
from kvpool.layouts.summaries import SUMMARY_BLOCK_TOKENS_MAX, check_summaries, summary_bytes_of, unfit_for_summaries

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
EXTENTS_MAX = 4096
EXTENT_ALIGN_BYTES = 4096
CHUNK_BYTES_MAX = 4 << 30
_FINGERPRINT_VERSION = 1
_GROUPS_VERSION = 0xFFFFFFFF
_FIELDS = 10
_FURTHER_FIELDS = 3
# Fields that a layout with groups has itself; all others are of each group.
_OF_ALL_GROUPS = ("chunk_tokens", "rank", "world", "groups")
# A Layout's fields as they travel and are stored.
WireLayout = list[int | str | list[Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry of one chunk on one rank.

    `layers` × `planes` (2 for K and V, 1 for MLA) × `chunk_tokens` × `kv_heads` (on this rank) × `head_dim`
    items of `dtype`. `format` and `block_tokens` declare a packed engine layout: a block's bytes are opaque
    and chunks are shared only between engines that declare the same two. `rank=None` is a scheduler's
    layout: it stands for all ranks of `world`. `stages`: the layers of each pipeline stage, where the ranks of
    `world` are those of one stage after the other; `layers` is then that of this rank's stage, and in a
    scheduler's layout that of the longest. `summaries`: the form of the summaries that each chunk has behind its layers.
    `head_groups`: into how many parts of equally many heads a layer is divided, each an extent of its own: the largest
    tensor-parallel size whose engines share the chunks. `kv_heads` and `layers` are then those of the whole model.

    `groups`: where layers need different chunks of a prompt. Such a layout has no geometry of its own (`layers` is 0): each
    group has a plain Layout (`of_group`), with its role in `group`. One full group is a plain Layout.

    Raises InvalidArgument, naming the field, its value and what was expected.
    """

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    chunk_tokens: int = 256
    planes: int = 2
    rank: int | None = 0
    world: int = 1
    format: str = ""
    block_tokens: int | None = None
    stages: tuple[int, ...] = ()
    summaries: str = ""
    head_groups: int = 1
    groups: tuple[Group, ...] = ()
    group: GroupRole | None = None
    # Of each group, made once: engines and the pool ask for them in every call. Empty for a plain layout.
    _group_layouts: "tuple[Layout, ...]" = field(default=(), init=False, repr=False, compare=False)
    # Of each group how many chunks the longest hit needs. Empty for a plain layout.
    _chunks_needed: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_group_layouts", self._take_groups() if self.groups else ())
        needed = tuple(group.chunks_of(sys.maxsize) for group in self._group_layouts)
        object.__setattr__(self, "_chunks_needed", needed)
        if self.groups:
            return
        _check_count("layers", self.layers, LAYERS_MAX)
        _check_count("kv_heads", self.kv_heads, 65536)
        _check_count("head_dim", self.head_dim, 65536)
        _check_count("chunk_tokens", self.chunk_tokens, 1 << 20)
        _check_count("planes", self.planes, 2)
        self._check_ranks()
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument(f"layout dtype is {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        if not isinstance(self.format, str) or len(self.format.encode()) > 256:
            raise InvalidArgument(f"layout format is {self.format!r}, expected a string of at most 256 bytes")
        self._check_blocks()
        self._check_stages()
        self._check_summaries()
        self._check_head_groups()
        if self.stored_bytes > CHUNK_BYTES_MAX:
            raise InvalidArgument(
                f"layout makes chunks of {self.stored_bytes} bytes, expected at most {CHUNK_BYTES_MAX}"
            )

    def _take_groups(self) -> "tuple[Layout, ...]":
        """Check the groups and each one's geometry, and make their layouts; one full group is this layout's own geometry."""
        for each in fields(Layout):
            value = getattr(self, each.name)
            if each.init and each.name not in _OF_ALL_GROUPS and value != each.default:
                raise InvalidArgument(f"layout {each.name} is {value!r} beside groups, expected it in each group")
        groups = checked_groups(self.groups)
        self._check_ranks()
        _check_count("chunk_tokens", self.chunk_tokens, 1 << 20)
        object.__setattr__(self, "groups", groups)
        if len(groups) == 1 and role_of(groups, 0).is_full:
            own = groups[0].geometry(self.chunk_tokens) | {"groups": ()}
            for name, value in own.items():
                object.__setattr__(self, name, value)
            return ()
        return tuple(self._make_group(index) for index in range(len(groups)))

    def _make_group(self, index: int) -> "Layout":
        try:
            own = self.groups[index].geometry(self.chunk_tokens)
            role = role_of(self.groups, index)
            return Layout(chunk_tokens=self.chunk_tokens, rank=self.rank, world=self.world, group=role, **own)
        except InvalidArgument as error:
            raise InvalidArgument(f"group {index}: {error}") from error

    def _check_ranks(self) -> None:
        _check_count("world", self.world, WORLD_MAX)
        rank_fits = self.rank is None or (_is_count(self.rank) and 0 <= self.rank < self.world)
        if not rank_fits:
            raise InvalidArgument(f"layout rank is {self.rank!r}, expected None or 0..{self.world - 1}")

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

    def _check_summaries(self) -> None:
        if self.summaries != "":
            check_summaries(self)
            if self.extents > LAYERS_MAX:
                most = f"{LAYERS_MAX} at most with the {self.summary_extents} behind them"
                raise unfit_for_summaries(self, "layers", most)

    def _check_head_groups(self) -> None:
        _check_count("head_groups", self.head_groups, self.kv_heads)
        if self.head_groups == 1:
            return
        if self.kv_heads % self.head_groups:
            raise InvalidArgument(
                f"layout head_groups is {self.head_groups}, expected a divisor of kv_heads {self.kv_heads}"
            )
        if self.summaries:
            raise unfit_for_summaries(self, "head_groups", "1: a summary is made of all heads of a layer")
        if self.extents > EXTENTS_MAX:
            raise InvalidArgument(
                f"layout head_groups is {self.head_groups}, expected at most {EXTENTS_MAX // self.layers} "
                f"with {self.layers} layers"
            )

    def _layers_of(self, rank: int | None) -> int:
        return max(self.stages) if rank is None else self.stages[rank * len(self.stages) // self.world]

    @property
    def token_plane_bytes(self) -> int:
        """Bytes of one token in one plane of one layer; of a state all."""
        return self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def plane_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens in one plane of one layer. A state has as many for any."""
        return self.token_plane_bytes * (1 if self.is_state else tokens)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a chunk: what an engine gives and gets."""
        return self.planes * self.plane_bytes(self.chunk_tokens)

    @property
    def payload_bytes(self) -> int:
        """Bytes of KV in an extent: of a layer, or of one head group of it."""
        return self.layer_bytes // self.head_groups

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent as it is stored and moved. Head groups begin at whole pages, and zeros fill what they leave."""
        if self.head_groups == 1:
            return self.layer_bytes
        return -(-self.payload_bytes // EXTENT_ALIGN_BYTES) * EXTENT_ALIGN_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's KV, layer-major: what an engine gives and gets."""
        return self.layers * self.layer_bytes

    @property
    def summary_block_tokens(self) -> int:
        """Tokens of a block that has a summary."""
        return gcd(self.chunk_tokens, SUMMARY_BLOCK_TOKENS_MAX)

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of one block of one KV head; 0 without summaries."""
        return summary_bytes_of(self.summaries, self.head_dim)

    @property
    def summary_extents(self) -> int:
        """Extents that a chunk's summaries fill, [layer][block][KV head]; what is left of the last one is zero."""
        if not self.summaries:
            return 0
        blocks = self.chunk_tokens // self.summary_block_tokens
        return -(-self.layers * blocks * self.kv_heads * self.summary_bytes // self.layer_bytes)

    @property
    def kv_extents(self) -> int:
        """Extents of a chunk's KV: head group g of layer l is extent l × head_groups + g."""
        return self.layers * self.head_groups

    @property
    def extents(self) -> int:
        """Extents of a chunk as it is stored, each with a checksum: its KV's, then its summaries'."""
        return self.kv_extents + self.summary_extents

    @property
    def stored_bytes(self) -> int:
        """Bytes of a chunk as it is stored and moved between tiers and nodes."""
        return self.extents * self.extent_bytes

    @property
    def is_packed(self) -> bool:
        """Whether the engine's blocks are opaque bytes."""
        return self.block_tokens is not None

    @property
    def is_chained(self) -> bool:
        """Whether a chunk follows the one before it. Those of windows and states have no parent."""
        return self.group is None or self.group.is_full

    def chunks_of(self, chunks: int) -> int:
        """How many chunks of this group, the last ones, a hit of so many chunks needs."""
        return chunks if self.group is None else self.group.chunks_of(chunks, self.chunk_tokens)

    @property
    def is_state(self) -> bool:
        """Whether a chunk is the state at its end, whose bytes are not those of tokens."""
        return self.group is not None and self.group.kind == STATE

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this layout stands for."""
        return tuple(range(self.world)) if self.rank is None else (self.rank,)

    def for_rank(self, rank: int) -> "Layout":
        """The layout of one rank."""
        return replace(self, rank=rank, layers=self._layers_of(rank) if self.stages else self.layers)

    def of_group(self, index: int) -> "Layout":
        """The plain layout of one group's chunks. A plain layout is its own only group."""
        if not self.groups:
            assert index == 0
            return self
        return self._group_layouts[index]

    @property
    def group_layouts(self) -> "tuple[Layout, ...]":
        """The plain layout of each group; a plain layout is its own only one."""
        return self._group_layouts or (self,)

    def rows_of(self, chunks: int) -> int:
        """How many chunks of all groups a hit of so many chunks needs."""
        if not self._chunks_needed:
            return chunks
        return sum([most if most < chunks else chunks for most in self._chunks_needed])

    @property
    def parts(self) -> "tuple[Layout, ...]":
        """The plain layout of each column of keys: of each rank, of one group after the other."""
        return tuple(group.for_rank(rank) for group in self.group_layouts for rank in self.ranks)

    def fingerprint(self) -> bytes:
        """Canonical bytes of every field: fixed-width numbers, length-prefixed strings, a version in front.

        Stages come after all others, and only where there are any; then summaries, only where there are any, behind the number
        of stages, which may then be 0; last the tagged entries, only where there are any, behind both, which may be empty.
        """
        assert self.rank is not None, "a scheduler's layout has one fingerprint for each rank"
        if self.groups:  # of connections alone, and unlike that of any group
            counted = struct.pack("<2I", _GROUPS_VERSION, len(self.groups))
            return counted + b"".join(part.fingerprint() for part in self.parts)
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
        return struct.pack("<9I", *numbers) + _prefixed(dtype) + _prefixed(name) + self._later_bytes()

    def _later_bytes(self) -> bytes:
        """What layouts of the first release did not have; nothing for one that has none of it."""
        tail = tail_of(self.group, self.head_groups)
        if not self.stages and not self.summaries and not tail:
            return b""
        counted = (len(self.stages), *self.stages)
        stages = struct.pack(f"<{len(counted)}I", *counted)
        return stages + _prefixed(self.summaries.encode()) + tail if self.summaries or tail else stages

    def to_wire(self) -> WireLayout:
        """The fields as the handshake carries them; rank -1 stands for a scheduler.

        Stages are a further field where there are any, summaries one behind it, tagged entries (head groups, groups, a
        group's role) the last; the ones before may then be empty.
        """
        own: WireLayout = [
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
        if entries := entries_of(self.groups, self.group, self.head_groups):
            return [*own, list(self.stages), self.summaries, entries]
        if self.summaries:
            return [*own, list(self.stages), self.summaries]
        return [*own, list(self.stages)] if self.stages else own

    @classmethod
    def from_wire(cls, fields: object) -> "Layout":
        """The layout that a peer sent. Raises LayoutMismatch on anything but valid fields."""
        if not isinstance(fields, list) or not _FIELDS <= len(fields) <= _FIELDS + _FURTHER_FIELDS:
            raise LayoutMismatch(
                f"layout in the handshake is not a list of {_FIELDS} fields, or {_FIELDS + 1} with stages, "
                f"{_FIELDS + 2} with summaries, {_FIELDS + 3} with entries"
            )
        layers, kv_heads, head_dim, dtype, chunk_tokens, planes, rank, world, name, block_tokens = fields[:_FIELDS]
        stages, summaries, grouped = read_further(fields[_FIELDS:])
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
                summaries=summaries,
                **grouped,
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
