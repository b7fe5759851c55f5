"""Instruction sets of summaries, recall and attention, and the building of summaries, measured by `bench sparse`.

Main thread of a command: which instruction set runs is a choice for the whole process, put back at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kvpool_native
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence
from kvpool_tools.bench.lookup_attention.timings import milliseconds
from kvpool_tools.bench.measure import median, rates, spread

Advance = Callable[[int], None]
PATHS = ("portable", "avx2", "avx512")
# Pages whose summaries are built for each instruction set.
PATH_PAGES = 16
BUILD_BAR_GB_PER_S = 1.5


def measure_building(sequence: MeasuredSequence, advance: Advance) -> dict[str, object]:
    """Fill a sequence and summarise all of it: a row. Its bar is for each core, so that CPU time counts."""
    size = sequence.layout.chunk_bytes
    for _ in sequence.fill():
        advance(2 * sequence.pages)
    read, built, cpu = [], [], []
    for number in range(sequence.pages):
        read.append(size / sequence.read_page(number)[0] / 1e9)
        seconds, cpu_s = sequence.summarise_page(number)
        built.append(size / seconds / 1e9)
        cpu.append(size / cpu_s / 1e9)
        advance(2 * sequence.pages)
    form = sequence.page_form
    return {
        "name": form.summary_form,
        "pages": sequence.pages,
        "blocks": sequence.pages * form.blocks * sequence.layout.layers,
        **rates("read", read),
        **rates("build", built),
        "build_gb_per_cpu_s": round(median(cpu), 2),
        "build_spread_gb_per_cpu_s": spread(cpu),
        "build_bar_gb_per_cpu_s": BUILD_BAR_GB_PER_S,
        "summaries_percent": round(100 * form.page_summary_bytes / size, 2),
        "cpu_seconds": round(sum(size / rate / 1e9 for rate in cpu), 2),
    }


def measure_paths(sequence: MeasuredSequence, rounds: int, advance: Advance) -> list[dict[str, object]]:
    """A row for each instruction set that the processor has, with the sequence's configuration and threads."""
    rows = []
    known = [path for path in PATHS if _has(path)]
    for path in known:
        with _forced(path):
            rows.append({"name": path, **_measure_path(sequence, rounds, lambda: advance(len(known) * (rounds + 1)))})
    return rows


def _measure_path(sequence: MeasuredSequence, rounds: int, advance: Callable[[], None]) -> dict[str, object]:
    size = sequence.layout.chunk_bytes
    pages = range(min(PATH_PAGES, sequence.pages))
    built = [size / sequence.summarise_page(number)[0] / 1e9 for number in pages]
    advance()
    read, dense, recall, choice = [], [], [], []
    for _ in range(rounds):
        read.append(sequence.timed_read(sequence.next_layer())[0])
        dense.append(sequence.timed_dense(sequence.next_layer(), sequence.query())[0])
        recall.append(sequence.timed_recall(sequence.next_layer(), sequence.query())[0])
        choice.append(sequence.timed_choice(sequence.next_layer(), sequence.query())[0])
        advance()
    return {
        "attention": kvpool_native.attention_path(),
        "threads": sequence.threads,
        **rates("build", built),
        **milliseconds("recall", recall),
        **milliseconds("choice", choice),
        **milliseconds("dense", dense),
        **milliseconds("read", read),
    }


def _has(path: str) -> bool:
    """Whether the processor builds summaries and recalls by this instruction set."""
    before = kvpool_native.sparse_path()
    try:
        kvpool_native.force_sparse_path(path)
    except ValueError:
        return False
    kvpool_native.force_sparse_path(before)
    return True


@contextmanager
def _forced(path: str) -> Iterator[None]:
    """This instruction set meanwhile; attention that the processor has not by it stays as it is, which its row shows."""
    before, attention = kvpool_native.sparse_path(), kvpool_native.attention_path()
    kvpool_native.force_sparse_path(path)
    try:
        try:
            kvpool_native.choose_attention_path(path)
        except ValueError:
            kvpool_native.choose_attention_path(attention)
        yield
    finally:
        kvpool_native.force_sparse_path(before)
        kvpool_native.choose_attention_path(attention)
