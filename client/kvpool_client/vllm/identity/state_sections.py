"""Sections of a recurrent state: the runs of a rank's state of which ranks of other tensor-parallel sizes have more or less.

A state of vLLM's is its tensors one behind the other. Ranks divide each of them along its heads or channels, and the channels
of a convolution are those of several projections one behind the other, each divided by itself:

    mamba_type        convolved channels          recurrent
    mamba1            x                           [channels, …]
    mamba2            x, B, C; B as wide as C     [heads, width, …], x is as wide as both
    gdn_attn          Q, K, V; Q as wide as K     [heads, width, …], V is as wide as both
    linear            none                        [heads, …]
    short_conv        x                           none

The convolved inputs are [steps, channels] or [channels, steps] (VLLM_SSM_CONV_STATE_LAYOUT), with more channels than steps.
Runs of equal length of one tensor are one section. The orders are those of vLLM 0.32 (its shapes of states, and its NIXL
connector's transfer of them, which divides states in the same way). Pure; any thread.
"""

from dataclasses import dataclass
from math import prod

from kvpool.layout import ITEM_BYTES
from kvpool_client.vllm.surface import CacheSpec

# Names of the kinds in vLLM's releases, by what their states are.
MAMBA1, MAMBA2, DELTA, LINEAR, SHORT = "mamba1", "mamba2", "gdn", "linear", "short_conv"
KINDS = {
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "gdn_attn": DELTA,
    "gdn_attention": DELTA,
    "linear": LINEAR,
    "linear_attention": LINEAR,
    "short_conv": SHORT,
}
# Shapes that a state of each kind has; others have records of more in their blocks.
SHAPES = {MAMBA1: 2, MAMBA2: 2, DELTA: 2, LINEAR: 1, SHORT: 1}


@dataclass(frozen=True, slots=True)
class Section:
    """Runs of `run_bytes` bytes in a rank's state, which begin at `offsets`. `facts`: what the bytes are, whatever the size."""

    offsets: tuple[int, ...]
    run_bytes: int
    facts: str


def sections_of(spec: CacheSpec) -> tuple[Section, ...]:
    """The sections of a rank's state; none where it is not known how ranks divide it, or where each has all of it."""
    kind = KINDS.get(_name_of(getattr(spec, "mamba_type", "")), "")
    shapes = [tuple(int(size) for size in shape) for shape in getattr(spec, "shapes", ())]
    items = [ITEM_BYTES.get(str(dtype).removeprefix("torch."), 0) for dtype in getattr(spec, "dtypes", ())]
    is_whole = not kind or len(shapes) != SHAPES[kind] or len(items) != len(shapes) or not all(items)
    if is_whole or getattr(spec, "tp_replicated", False):
        return ()
    sections: list[Section] = []
    start = 0
    if kind != LINEAR:
        sections += _convolved(kind, shapes, items[0])
        if not sections:
            return ()
        start = prod(shapes[0]) * items[0]
    if kind != SHORT:
        shape = shapes[-1]
        facts = f"{kind}/recurrent/{items[-1]}/{'x'.join(map(str, shape[1:]))}"
        sections.append(Section((start,), prod(shape) * items[-1], facts))
    return tuple(sections)


def _convolved(kind: str, shapes: list[tuple[int, ...]], item: int) -> list[Section]:
    """The sections of a convolution's inputs; none where its shape is not that of its kind."""
    shape = shapes[0]
    if len(shape) != 2 or shape[0] == shape[1]:
        return []
    steps, channels = sorted(shape)
    widths = _widths(kind, channels, shapes[-1])
    if not widths:
        return []
    is_by_channel = shape[0] == channels
    unit = item * (steps if is_by_channel else 1)
    begins = [sum(widths[:place]) for place in range(len(widths))]
    runs = [
        (row * channels * item + begin * unit, width * unit)
        for row in range(1 if is_by_channel else steps)
        for begin, width in zip(begins, widths, strict=True)
    ]
    order = "channels" if is_by_channel else "steps"
    return [
        Section(
            tuple(offset for offset, length in runs if length == size),
            size,
            f"{kind}/convolved/{item}/{steps} by {order}/{[size == width * unit for width in widths]}",
        )
        for size in dict.fromkeys(length for _, length in runs)
    ]


def _widths(kind: str, channels: int, recurrent: tuple[int, ...]) -> tuple[int, ...]:
    """The channels of each projection on a rank; none where the shapes contradict each other."""
    if kind == SHORT:
        return (channels,)
    if kind == MAMBA1:
        return (channels,) if recurrent[0] == channels else ()
    own = prod(recurrent[:2])
    other, rest = divmod(channels - own, 2)
    if rest or other <= 0 or len(recurrent) != 3:
        return ()
    return (own, other, other) if kind == MAMBA2 else (other, other, own)


def _name_of(mamba_type: object) -> str:
    return str(getattr(mamba_type, "name", mamba_type)).lower()
