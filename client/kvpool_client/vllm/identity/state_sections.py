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
Runs of projections of one width are one section. B and C of a model with one group of them are the same on every rank. The
orders are those of vLLM 0.32 (its shapes of states, and its NIXL connector's transfer of them, which divides states in the same
way). Pure; any thread.
"""

from dataclasses import dataclass
from itertools import accumulate
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
    """Runs of `run_bytes` bytes in a rank's state, which begin at `offsets`. `facts`: what the bytes are, whatever the size.
    `is_whole`: every rank has the same ones."""

    offsets: tuple[int, ...]
    run_bytes: int
    facts: str
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class _Projection:
    """Channels of a rank's convolution. `number`: of the section that its runs are in."""

    width: int
    number: int
    is_whole: bool = False


def sections_of(spec: CacheSpec, groups: int = 0) -> tuple[Section, ...]:
    """The sections of a rank's state; none where it is not known how ranks divide it, or where each has all of it. `groups`:
    of B and C in the whole model, 0: not known."""
    kind = KINDS.get(_name_of(getattr(spec, "mamba_type", "")), "")
    shapes = [tuple(int(size) for size in shape) for shape in getattr(spec, "shapes", ())]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in getattr(spec, "dtypes", ())]
    is_odd = (
        not kind or len(shapes) != SHAPES[kind] or len(dtypes) != len(shapes) or not set(dtypes) <= ITEM_BYTES.keys()
    )
    if is_odd or getattr(spec, "tp_replicated", False):
        return ()
    sections: list[Section] = []
    start = 0
    if kind != LINEAR:
        sections += _convolved(kind, shapes, dtypes[0], groups)
        if not sections:
            return ()
        start = prod(shapes[0]) * ITEM_BYTES[dtypes[0]]
    if kind != SHORT:
        shape = shapes[-1]
        facts = f"{kind}/recurrent/{dtypes[-1]}/{'x'.join(map(str, shape[1:]))}"
        sections.append(Section((start,), prod(shape) * ITEM_BYTES[dtypes[-1]], facts))
    return tuple(sections)


def _convolved(kind: str, shapes: list[tuple[int, ...]], dtype: str, groups: int) -> list[Section]:
    """The sections of a convolution's inputs; none where its shape is not that of its kind."""
    shape = shapes[0]
    if len(shape) != 2 or shape[0] == shape[1]:
        return []
    steps, channels = sorted(shape)
    projections = _projections(kind, channels, shapes[-1], groups)
    is_by_channel = shape[0] == channels
    unit = ITEM_BYTES[dtype] * (steps if is_by_channel else 1)
    ends = list(accumulate(projection.width for projection in projections))
    runs = [
        (projection, row * channels * ITEM_BYTES[dtype] + (end - projection.width) * unit)
        for row in range(1 if is_by_channel else steps)
        for projection, end in zip(projections, ends, strict=True)
    ]
    order = "channels" if is_by_channel else "steps"
    return [
        Section(
            tuple(offset for projection, offset in runs if projection.number == number),
            one.width * unit,
            f"{kind}/convolved {number}/{dtype}/{steps} by {order}",
            one.is_whole,
        )
        for number, one in {projection.number: projection for projection in projections}.items()
    ]


def _projections(kind: str, channels: int, recurrent: tuple[int, ...], groups: int) -> tuple[_Projection, ...]:
    """The projections of a rank's channels; none where the shapes contradict each other."""
    if kind == SHORT:
        return (_Projection(channels, 0),)
    if kind == MAMBA1:
        return (_Projection(channels, 0),) if recurrent[0] == channels else ()
    own = prod(recurrent[:2])
    other, rest = divmod(channels - own, 2)
    if rest or other <= 0 or len(recurrent) != 3:
        return ()
    if kind == DELTA:
        keys = _Projection(other, 0)
        return (keys, keys, _Projection(own, 1))
    shared = _Projection(other, 1, is_whole=groups == 1 and other == recurrent[2])
    return (_Projection(own, 0), shared, shared)


def _name_of(mamba_type: object) -> str:
    return str(getattr(mamba_type, "name", mamba_type)).lower()
