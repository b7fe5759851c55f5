"""Report of the benchmark: a row for each cell, beside its scheduler's cell without a cache, and the verdict."""

from collections.abc import Sequence
from typing import Any

from examples.engine.cells import Cache, Cell


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Seconds, tokens in a second, and how many times as fast as without a cache: `prefill_x` and `total_x`."""
    rows = []
    for cell in cells:
        counts, base = cell.counts, next(one for one in cells if one.scheduler == cell.scheduler)
        rows.append(
            {
                "scheduler": cell.scheduler,
                "cache": cell.cache.label,
                "prefill_s": round(counts.prefill_s, 3),
                "decode_s": round(counts.decode_s, 3),
                "elapsed_s": round(cell.elapsed_s, 3),
                "prompt_per_s": round(counts.prompt_tokens / counts.prefill_s),
                "completion_per_s": round(counts.completion_tokens / counts.decode_s),
                "total_per_s": round((counts.prompt_tokens + counts.completion_tokens) / cell.elapsed_s),
                "prefill_x": round(base.counts.prefill_s / counts.prefill_s, 2),
                "total_x": round(base.elapsed_s / cell.elapsed_s, 2),
                "reused_tokens": counts.reused_tokens,
                "reused_logits": counts.reused_logits,
            }
        )
    return rows


def failures(cells: Sequence[Cell]) -> list[str]:
    """Cells whose tokens differ from those of the first one, and what is wrong with a cell's blocks."""
    found = []
    for cell in cells:
        problems = [*cell.problems, *(["other tokens than the first cell"] if cell.answers != cells[0].answers else [])]
        found += [f"{cell.scheduler}, {cell.cache.label}: {problem}" for problem in problems]
    return found


def missed_bars(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows that are not so much faster as they are to be."""
    caches = {cache.label: cache for cache in Cache}
    return [
        f"{row['scheduler']}, {row['cache']}: {column} is {row[column]}, expected {bar:g}"
        for row in rows
        for column, bar in zip(("prefill_x", "total_x"), caches[row["cache"]].bars, strict=True)
        if row[column] < bar
    ]
