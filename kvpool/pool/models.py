"""Models that have chunks in the pool, or engines connected: one row for each layout, and each group of a layout with groups.

What is stored is counted by a walk through each tier's directory, in parts, so that others are served in between: chunks that
are stored or removed meanwhile may count or not. Control thread only. Holds no state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.ids import PROBE_MODEL
from kvpool.index.layout_uses import LayoutUse, LayoutUses
from kvpool.index.namespaces import Namespace
from kvpool.index.parts import Parts
from kvpool.journal.event_log import Change
from kvpool.layout import Layout
from kvpool.row_structs import struct_of

# Chunks of one part.
LISTED_CHUNKS = 2048
# Those with the most bytes: so many rows fit the items of a frame (ITEMS_MAX of `protocol/frames.py`).
ROWS_MAX = 100

# What is stored, by the number of its namespace.
Counts = list[int]
_ROW, _ = struct_of(kvpool_native.CHANGE_ROW, "key", "unused")


@dataclass(slots=True)
class _Row:
    """All ranks of a model in one layout or group of a layout."""

    model: str
    layout: Layout
    numbers: list[int] = field(default_factory=list)


def list_models(
    directories: Mapping[str, kvpool_native.Directory],
    namespaces: Sequence[Namespace],
    connections: Iterable[Iterable[Namespace]],
    *,
    uses: LayoutUses,
    now_ns: int,
) -> Parts[dict[str, Any]]:
    """The rows (`models`), those with the most bytes first, and how many are `left_out`.

    `directories`: of each tier, by its name. `connections`: the namespaces of each.
    """
    rows = _rows_of(namespaces)
    most = 1 + max((namespace.id for namespace in namespaces), default=0)
    by_tier: dict[str, Counts] = {}
    distinct = [0] * most
    for name, directory in directories.items():
        counts = by_tier[name] = [0] * most
        cursor, has_more = 0, True
        while has_more:
            cursor, packed = directory.list_chunks(cursor, LISTED_CHUNKS)
            has_more = bool(cursor)
            _count(packed, directory.level, counts, distinct)
            yield None
    joined = [{int(namespace.id) for namespace in of_connection} for of_connection in connections]
    listed = [
        _report(row, by_tier, distinct, joined, use=uses.of(row.model, row.layout), now_ns=now_ns) for row in rows
    ]
    listed.sort(key=lambda one: (-sum(one[f"{name}_bytes"] for name in directories), one["model"]))
    return {"models": listed[:ROWS_MAX], "left_out": max(0, len(listed) - ROWS_MAX)}


def _rows_of(namespaces: Sequence[Namespace]) -> list[_Row]:
    rows: dict[tuple[str, bytes], _Row] = {}
    for namespace in namespaces:
        if namespace.model != PROBE_MODEL:  # the daemon's own chunk
            identity = (namespace.model, namespace.layout.for_rank(0).fingerprint())
            rows.setdefault(identity, _Row(namespace.model, namespace.layout)).numbers.append(int(namespace.id))
    return list(rows.values())


def _count(rows: bytes, level: int, counts: Counts, distinct: Counts) -> None:
    """Add chunks by namespace; to `distinct` where no faster tier has them. Namespaces that are new are left out."""
    faster = (1 << level) - 1
    for row in map(Change._make, _ROW.iter_unpack(rows)):
        if row.namespace < len(counts):
            counts[row.namespace] += 1
            distinct[row.namespace] += not row.tiers & faster


def _report(
    row: _Row,
    by_tier: Mapping[str, Counts],
    distinct: Counts,
    joined: Sequence[set[int]],
    *,
    use: LayoutUse | None,
    now_ns: int,
) -> dict[str, Any]:
    size = row.layout.stored_bytes
    stored = {name: sum(counts[number] for number in row.numbers) for name, counts in by_tier.items()}
    return {
        "model": row.model,
        "layout": _described(row.layout),
        "ranks": len(row.numbers),
        "chunks": sum(distinct[number] for number in row.numbers),
        **{f"{name}_bytes": chunks * size for name, chunks in stored.items()},
        "lookup_tokens": 0 if use is None else use.lookup_tokens,
        "hit_tokens": 0 if use is None else use.hit_tokens,
        "unused_s": None if use is None else round((now_ns - use.used_ns) / NS_PER_S, 1),
        "connections": sum(not own.isdisjoint(row.numbers) for own in joined),
    }


def _described(layout: Layout) -> str:
    """A layout in a line: its group's role, geometry, and what else differs between layouts."""
    words = [f"{layout.chunk_tokens} tokens", f"{layout.layers} layers"]
    words.append(f"{layout.kv_heads} {'heads' if layout.planes > 1 else 'latent heads'} of {layout.head_dim}")
    words.append(layout.dtype)
    words += [layout.format] if layout.format else []
    words += [f"{layout.head_groups} head groups"] if layout.head_groups > 1 else []
    words += [f"{len(layout.stages)} stages"] if layout.stages else []
    words += [f"{layout.summaries} summaries"] if layout.summaries else []
    role = "" if layout.group is None else f"{layout.group}: "
    return f"{role}{', '.join(words)}; {layout.world} ranks" if layout.world > 1 else f"{role}{', '.join(words)}"
