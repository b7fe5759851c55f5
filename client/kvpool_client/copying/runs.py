"""Runs of a head group: which bytes of an engine's block belong to one group of its heads.

    token-major  [tokens, heads, dim]       a run for each token: the group's heads of it, `run_stride` behind the last one's
    head-major   [heads, tokens, dim]       one run, where a group is one head; seen as [tokens, heads, dim] by its strides
    packed       [heads, …] opaque bytes    one run: the bytes of the group's heads

Pure functions; any thread.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from kvpool.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Axes:
    """The inner axes of a block's plane: shape and strides in bytes, from the tokens on, or a packed block's heads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRuns:
    """`runs` runs of `run_bytes` bytes that are `run_stride` apart; those of the next group begin `group_stride` behind."""

    runs: int
    run_bytes: int
    run_stride: int
    group_stride: int


def group_runs(axes: Axes, groups: int, *, is_packed: bool) -> GroupRuns:
    """Where the runs of a group lie in a block's plane. Raises LayoutMismatch."""
    if is_packed:
        heads, size = _grouped_heads(axes, groups)
        return GroupRuns(1, size, 0, heads)
    tokens, stride = axes.shape[0], axes.strides[0]
    group_stride, size = _grouped_heads(Axes(axes.shape[1:], axes.strides[1:], axes.item_bytes), groups)
    if tokens == 1 or stride == size:
        return GroupRuns(1, tokens * size, 0, group_stride)
    return GroupRuns(tokens, size, stride, group_stride)


def check_apart(steps: Iterable[tuple[int, int]], run_bytes: int, strides: tuple[int, ...]) -> None:
    """Check that runs of so many bytes do not overlap, at `(count, stride)` of each axis. Raises LayoutMismatch."""
    covered = run_bytes
    for count, stride in sorted(steps, key=lambda step: step[1]):
        if count > 1 and stride < covered:
            raise LayoutMismatch(f"strides {strides} make blocks, planes or heads overlap: {stride} is below {covered}")
        covered += max(count - 1, 0) * stride


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    """Whether such an array has no gaps and its last axis is the innermost."""
    expected = item_bytes
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _grouped_heads(axes: Axes, groups: int) -> tuple[int, int]:
    """`(stride, bytes)` of a group of heads, which are the first of the axes, or together with the items one axis."""
    whole = prod(axes.shape) * axes.item_bytes
    if is_contiguous(axes.shape, axes.strides, axes.item_bytes) and whole % groups == 0:
        return whole // groups, whole // groups
    heads, stride = axes.shape[0], axes.strides[0]
    head_bytes = prod(axes.shape[1:]) * axes.item_bytes
    if heads % groups or not is_contiguous(axes.shape[1:], axes.strides[1:], axes.item_bytes):
        raise LayoutMismatch(
            f"heads of shape {axes.shape} and strides {axes.strides} are no {groups} groups without gaps"
        )
    if heads > groups and stride != head_bytes:
        raise LayoutMismatch(
            f"strides {axes.strides} leave gaps between the {heads // groups} heads of a group: expected one head a group"
        )
    return heads // groups * stride, heads // groups * head_bytes
