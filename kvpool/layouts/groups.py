"""Groups of a layout: layers of one model that need different chunks of a prompt, and the role of a group's own layout.

    full      every chunk of the prompt                       layers that attend to all tokens
    window    the last chunks, as many as the window covers    layers that attend to the last `window` tokens
    state     the last chunk alone                             recurrent layers: their state at that chunk's end

Chunks of windows and states have no parent: each is stored, evicted and found by itself. Immutable; any thread.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvpool.errors import InvalidArgument, LayoutMismatch

FULL, WINDOW, STATE = "full", "window", "state"
KINDS = (FULL, WINDOW, STATE)
GROUPS_MAX = 64
WINDOW_MAX = 1 << 30
STATE_BYTES_MAX = 1 << 30
# Tags of the entries of a layout's wire form, and of its fingerprint's tail.
HEAD_GROUPS_TAG, ROLE_TAG, GROUPS_TAG, GROUP_HEADS_TAG = 1, 2, 3, 4
_GROUP_HEADS = "head_groups of groups"
_DIM_MAX = 65536  # of heads, and of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that need the same chunks of a prompt: an entry of a Layout's `groups`, for models with several kinds of
    attention.

    `kind`: "full" (every chunk), "window" (the last ones, as many as the window covers) or "state" (the last one alone).
    `window`: tokens that a layer of kind "window" attends to. `state_bytes`: of a layer of kind "state", at the end of a chunk,
    opaque. `layers`, `kv_heads`, `head_dim`, `dtype`, `planes`, `format`, `block_tokens` and `head_groups` are as a Layout's,
    for the layers of this group; of a state head groups divide its bytes, which are then those of all ranks, one rank's behind
    the other's. Raises InvalidArgument for what cannot be of this kind; the Layout that has the group checks the rest.
    """

    kind: str = FULL
    window: int = 0
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    planes: int = 2
    format: str = ""
    block_tokens: int | None = None
    state_bytes: int = 0
    head_groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"group kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        _check_of_kind(self, "window", WINDOW, WINDOW_MAX)
        _check_of_kind(self, "state_bytes", STATE, STATE_BYTES_MAX)
        if self.kind != STATE:
            return
        if self.kv_heads or self.head_dim or self.block_tokens is not None:
            raise InvalidArgument("group of kind 'state' has KV heads or blocks, expected state_bytes alone")

    def geometry(self, chunk_tokens: int) -> dict[str, Any]:
        """The fields of the group's own Layout."""
        own = {name: getattr(self, name) for name in ("layers", "kv_heads", "head_dim", "dtype", "planes")}
        if self.kind != STATE:
            return own | {name: getattr(self, name) for name in ("format", "block_tokens", "head_groups")}
        shape = {"dtype": "uint8", "planes": 1, "format": self.format or STATE, "block_tokens": chunk_tokens}
        return own | shape | self._state_shape() | {"head_groups": self.head_groups}

    def _state_shape(self) -> dict[str, int]:
        """A state's bytes as heads of equally many, which head groups divide."""
        is_count = isinstance(self.head_groups, int) and not isinstance(self.head_groups, bool) and self.head_groups > 0
        if not is_count or self.state_bytes % self.head_groups:
            raise InvalidArgument(
                f"group head_groups is {self.head_groups!r}, expected a divisor of state_bytes {self.state_bytes}"
            )
        heads, width = self.head_groups, self.state_bytes // self.head_groups
        while width > _DIM_MAX and width % 2 == 0:
            heads, width = heads * 2, width // 2
        if width > _DIM_MAX:
            heads, width = self._odd_state_shape()
        return {"kv_heads": heads, "head_dim": width}

    def _odd_state_shape(self) -> tuple[int, int]:
        """The fewest heads of a state whose bytes are not halved often enough. Raises InvalidArgument."""
        part = self.state_bytes // self.head_groups
        for heads in range(-(-part // _DIM_MAX), _DIM_MAX // self.head_groups + 1):
            if part % heads == 0:
                return heads * self.head_groups, part // heads
        raise InvalidArgument(
            f"group state_bytes is {self.state_bytes}, expected so many that the {part} bytes of a head group are a product of "
            f"two numbers, up to {_DIM_MAX} and {_DIM_MAX // self.head_groups}: pad the state, to whole pages say"
        )


@dataclass(frozen=True, slots=True)
class GroupRole:
    """Role of a plain Layout in a layout with groups: kind, window, and its number among groups of equal kind and window."""

    kind: str
    window: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.window}" if self.window else self.kind

    @property
    def is_full(self) -> bool:
        """Whether its chunks form chains."""
        return self.kind == FULL

    def chunks_of(self, chunks: int, chunk_tokens: int) -> int:
        """How many chunks, the last ones, a hit of so many chunks needs."""
        if self.is_full:
            return chunks
        return min(chunks, -(-self.window // chunk_tokens) if self.kind == WINDOW else 1)

    def packed(self) -> bytes:
        """The role in a fingerprint."""
        return struct.pack("<3I", KINDS.index(self.kind), self.window, self.number)


# The fields of a group as it is sent in its own entry: those of later versions have entries of theirs.
_ROW = tuple(field.name for field in fields(Group) if field.name != "head_groups")


def checked_groups(groups: object) -> tuple[Group, ...]:
    """The groups of a layout as a tuple. Raises InvalidArgument."""
    is_sequence = isinstance(groups, Sequence) and not isinstance(groups, (str, bytes))
    if not is_sequence or not 1 <= len(groups) <= GROUPS_MAX:  # type: ignore[arg-type]  # a sequence by the line above
        raise InvalidArgument(f"layout groups is {groups!r}, expected 1..{GROUPS_MAX} Groups")
    for group in groups:  # type: ignore[attr-defined]  # a sequence by the line above
        if not isinstance(group, Group):
            raise InvalidArgument(f"layout groups has {group!r}, expected a Group")
    return tuple(groups)  # type: ignore[arg-type]  # a sequence by the line above


def role_of(groups: Sequence[Group], index: int) -> GroupRole:
    """The role of one of a layout's groups."""
    group = groups[index]
    number = sum((one.kind, one.window) == (group.kind, group.window) for one in groups[:index])
    return GroupRole(group.kind, group.window, number)


def tail_of(role: GroupRole | None, head_groups: int) -> bytes:
    """The tagged entries of head groups and a role at the end of a fingerprint; nothing without them."""
    tail = struct.pack("<3I", HEAD_GROUPS_TAG, 4, head_groups) if head_groups != 1 else b""
    packed = role.packed() if role is not None else b""
    return tail + struct.pack("<2I", ROLE_TAG, len(packed)) + packed if packed else tail


def entries_of(groups: Sequence[Group], role: GroupRole | None, head_groups: int) -> list[list[Any]]:
    """Head groups, groups and role as entries of a layout's wire form."""
    entries: list[list[Any]] = [[HEAD_GROUPS_TAG, head_groups]] if head_groups != 1 else []
    if role is not None:
        entries.append([ROLE_TAG, KINDS.index(role.kind), role.window, role.number])
    if groups:
        rows = [[getattr(group, name) or _empty(name) for name in _ROW] for group in groups]
        entries.append([GROUPS_TAG, *rows])
        if any(group.head_groups != 1 for group in groups):
            entries.append([GROUP_HEADS_TAG, *(group.head_groups for group in groups)])
    return entries


def read_further(further: list[object]) -> tuple[list[int], str, dict[str, Any]]:
    """Stages, summaries, and what entries say by field, of the fields behind those that every layout has. Raises
    LayoutMismatch."""
    stages: object = further[0] if further else []
    summaries: object = further[1] if len(further) > 1 else ""
    if not isinstance(stages, list) or (len(further) == 1 and not stages):
        raise LayoutMismatch("layout in the handshake has stages that are no list of numbers of layers")
    if not isinstance(summaries, str) or (len(further) == 2 and not summaries):
        raise LayoutMismatch("layout in the handshake has summaries that are no name of a form")
    return stages, summaries, _read_entries(further[2]) if len(further) > 2 else {}


def _read_entries(entries: object) -> dict[str, Any]:
    """The fields of a Layout that entries of its wire form have. Raises LayoutMismatch."""
    found: dict[str, Any] = {}
    last = 0
    for entry in entries if isinstance(entries, list) else [None]:
        tag = entry[0] if isinstance(entry, list) and entry else None
        if not isinstance(tag, int) or isinstance(tag, bool) or tag not in _READERS or tag <= last:
            raise LayoutMismatch("layout in the handshake has an entry that is none of a known tag, in ascending order")
        last = tag
        assert isinstance(entry, list)
        name, read = _READERS[tag]
        found[name] = read(entry[1:])
    if not found:
        raise LayoutMismatch("layout in the handshake has a list of entries without any")
    return _with_head_groups(found)


def _with_head_groups(found: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the head groups of each group in it."""
    counts: tuple[int, ...] | None = found.pop(_GROUP_HEADS, None)
    if counts is None:
        return found
    groups: tuple[Group, ...] = found.get("groups", ())
    if len(counts) != len(groups):
        raise LayoutMismatch(
            f"layout in the handshake has head groups of {len(counts)} groups, and {len(groups)} groups"
        )
    try:
        found["groups"] = tuple(replace(group, head_groups=count) for group, count in zip(groups, counts, strict=True))
    except InvalidArgument as error:
        raise LayoutMismatch(str(error)) from error
    return found


def _read_role(values: list[Any]) -> GroupRole:
    if len(values) != 3 or not all(type(value) is int for value in values):
        raise LayoutMismatch("layout in the handshake has a group's role that is no three integers")
    kind, window, number = values
    is_sound = 0 <= kind < len(KINDS) and 0 <= number < GROUPS_MAX
    if not is_sound or not (0 < window <= WINDOW_MAX if KINDS[kind] == WINDOW else window == 0):
        raise LayoutMismatch(f"layout in the handshake has a group's role of {values}")
    return GroupRole(KINDS[kind], window, number)


def _read_groups(rows: list[Any]) -> tuple[Group, ...]:
    """Groups as they are sent: each field with the type of its default."""
    if not rows or not all(isinstance(row, list) and len(row) == len(_ROW) for row in rows):
        raise LayoutMismatch(f"layout in the handshake has groups that are no lists of {len(_ROW)} fields")
    groups = []
    for row in rows:
        named = dict(zip(_ROW, row, strict=True))
        if any(type(value) is not type(_empty(name)) for name, value in named.items()):
            raise LayoutMismatch("layout in the handshake has a group with a field of another type")
        try:
            groups.append(Group(**named | {"block_tokens": named["block_tokens"] or None}))
        except InvalidArgument as error:
            raise LayoutMismatch(str(error)) from error
    return tuple(groups)


def _read_head_groups(values: list[Any]) -> int:
    if len(values) != 1 or type(values[0]) is not int or values[0] < 2:
        raise LayoutMismatch("layout in the handshake has head groups that are no number from 2 on")
    return int(values[0])


def _read_group_heads(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 1 for value in values) or set(values) <= {1}:
        raise LayoutMismatch("layout in the handshake has head groups of groups that are no numbers, some from 2 on")
    return tuple(values)


# By tag: the field of a Layout, or of its groups, and what reads it.
_READERS: dict[int, tuple[str, Callable[[list[Any]], object]]] = {
    HEAD_GROUPS_TAG: ("head_groups", _read_head_groups),
    ROLE_TAG: ("group", _read_role),
    GROUPS_TAG: ("groups", _read_groups),
    GROUP_HEADS_TAG: (_GROUP_HEADS, _read_group_heads),
}


def _empty(name: str) -> int | str:
    return "" if name in ("kind", "dtype", "format") else 0


def _check_of_kind(group: Group, name: str, kind: str, most: int) -> None:
    """Check a number that groups of one kind have, and no others."""
    value = getattr(group, name)
    expected = f"1..{most}" if group.kind == kind else "0"
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or not (1 <= value <= most if group.kind == kind else value == 0):
        raise InvalidArgument(f"group {name} is {value!r} of kind {group.kind!r}, expected {expected}")
