"""Layouts of every kind, as the table that end-to-end tests of the verbs are parameterized over.

A plain layout, one with groups, and the parts of both that an engine's ranks store together: whatever a verb promises holds for
each of them.
"""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL, WRITE_MODES

CHUNK = 32
WINDOW_CHUNKS = 2
FULL, WINDOW, STATE = range(3)
HYBRID = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=2, kv_heads=2, head_dim=16, dtype="float16"),
        kv.Group(kind="window", window=CHUNK * WINDOW_CHUNKS - 5, layers=6, kv_heads=1, head_dim=16, dtype="float16"),
        kv.Group(kind="state", layers=3, state_bytes=CHUNK * 24),
    ),
)
HEADS = kv.Layout(layers=4, kv_heads=8, head_dim=16, dtype="float16", chunk_tokens=CHUNK, head_groups=8)
LATENT = replace(HEADS, kv_heads=1, head_groups=1, planes=1)
# A head group of its state is no whole word, and no multiple of a chunk's tokens.
DIVIDED = kv.Layout(
    chunk_tokens=CHUNK,
    groups=(
        kv.Group(layers=2, kv_heads=4, head_dim=16, dtype="float16", head_groups=4),
        kv.Group(
            kind="window", window=2 * CHUNK - 5, layers=3, kv_heads=2, head_dim=32, dtype="float16", head_groups=2
        ),
        kv.Group(kind="state", layers=3, state_bytes=4 * 1001, head_groups=4),
    ),
)


def shares_of(layout: kv.Layout, size: int) -> list[Any]:
    """What `connect` takes as the share of each rank of an engine of this tensor-parallel size; of two pipeline stages where it
    is 0."""
    parts = layout.group_layouts
    if size:
        ranks = [[kv.Share.of_rank(part, rank, size) for part in parts] for rank in range(size)]
    else:
        stages = [(0, 1), (1, -1)]
        ranks = [
            [kv.Share(first, layers % part.layers, 0, part.head_groups) for part in parts] for first, layers in stages
        ]
    return ranks if layout.groups else [rank[0] for rank in ranks]


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. `shares`: of the ranks that store a chunk together; one that is None stores all of it."""

    layout: kv.Layout
    shares: tuple[Any, ...] = (None,)

    @property
    def has_windows(self) -> bool:
        """Whether a hit ends at boundaries alone."""
        return not all(part.is_chained for part in self.layout.group_layouts)


CASES = {
    "plain": Case(SMALL),
    "latent": Case(LATENT),
    "summaries": Case(replace(SMALL, head_dim=32, summaries="mean")),
    "stages": Case(SMALL, tuple(shares_of(SMALL, 0))),
    "heads": Case(HEADS, tuple(shares_of(HEADS, 2))),
    "windows": Case(kv.Layout(chunk_tokens=CHUNK, groups=HYBRID.groups[WINDOW:])),
    "hybrid": Case(HYBRID),
    "divided": Case(DIVIDED, tuple(shares_of(DIVIDED, 2))),
}


def over(*names: str) -> pytest.MarkDecorator:
    """Runs a test that takes `case` or `ranks` for these rows of the table, all of them where none is named."""
    return pytest.mark.parametrize("case", names or list(CASES), indirect=True)


def over_in_alternate_modes(*names: str) -> pytest.MarkDecorator:
    """The same, each row in one write mode: of what takes a daemon of its own, or long."""
    modes = cycle(WRITE_MODES)
    rows = [(name, next(modes)) for name in names or CASES]
    return pytest.mark.parametrize(("case", "write_mode"), rows, indirect=True)
