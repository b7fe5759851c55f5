"""Report of the benchmark: a table of its cells, each beside its scheduler's cell without a cache, and the verdict."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from examples.engine.cells import Cache, Cell
from kvpool.cli.output import print_line, print_table


def failures(cells: Sequence[Cell]) -> list[str]:
    """Cells whose tokens differ from those of the first one, and what is wrong with a cell's blocks."""
    found = []
    for cell in cells:
        problems = [*cell.problems, *(["other tokens than the first cell"] if cell.answers != cells[0].answers else [])]
        found += [f"{cell.scheduler}, {cell.cache.label}: {problem}" for problem in problems]
    return found


def missed_bars(cells: Sequence[Cell]) -> list[str]:
    """Cells that are not so much faster as they are to be."""
    return [
        f"{cell.scheduler}, {cell.cache.label}: {what} {factor:.2f} times as fast, expected {bar:g}"
        for cell, prefill, total in compared(cells)
        for what, factor, bar in (("prefill", prefill, cell.cache.prefill_bar), ("total", total, cell.cache.total_bar))
        if factor < bar
    ]


def compared(cells: Sequence[Cell]) -> Iterator[tuple[Cell, float, float]]:
    """Each cell, and how many times as fast prefill and the whole are as without a cache."""
    plain = {cell.scheduler: cell for cell in cells if cell.cache is Cache.NONE}
    for cell in cells:
        base = plain[cell.scheduler]
        yield cell, base.counts.prefill_s / cell.counts.prefill_s, cell.total_rate / base.total_rate


def show(cells: Sequence[Cell]) -> None:
    """Print the table, and what is wrong."""
    rows = [
        {
            "scheduler": cell.scheduler,
            "cache": cell.cache.label,
            "prefill s": f"{cell.counts.prefill_s:.3f}",
            "decode s": f"{cell.counts.decode_s:.3f}",
            "elapsed s": f"{cell.elapsed_s:.3f}",
            "prompt tok/s": f"{cell.counts.prompt_tokens / cell.counts.prefill_s:.0f}",
            "completion tok/s": f"{cell.counts.completion_tokens / cell.counts.decode_s:.0f}",
            "total tok/s": f"{cell.total_rate:.0f}",
            "prefill ×": f"{prefill:.2f}",
            "total ×": f"{total:.2f}",
            "reused tokens": cell.counts.reused_tokens,
            "reused logits": cell.counts.reused_logits,
        }
        for cell, prefill, total in compared(cells)
    ]
    counts = cells[0].counts
    tokens = f"{counts.prompt_tokens} prompt tokens, {counts.completion_tokens} completion tokens"
    print_table(f"{len(cells[0].answers)} requests, {tokens}", rows, columns_max=len(rows[0]))
    wrong = failures(cells)
    for line in wrong or ["tokens are identical in all cells, and no block leaked"]:
        print_line(f"FAILED: {line}" if wrong else line)


def to_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """All that was measured."""
    entries = [
        {
            "scheduler": cell.scheduler,
            "cache": cell.cache.label,
            **asdict(cell.counts),
            "elapsed_s": cell.elapsed_s,
            "total_tokens_per_s": cell.total_rate,
            "prefill_factor": prefill,
            "total_factor": total,
        }
        for cell, prefill, total in compared(cells)
    ]
    return {"cells": entries, "failures": failures(cells), "missed_bars": missed_bars(cells)}
