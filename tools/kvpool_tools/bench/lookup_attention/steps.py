"""`bench sparse`: one decoding step of one layer by lookup, against full attention and plain reading of the same memory.

A round reads all of a layer plainly, attends to all of it, recalls, chooses without a tail, attends to what was recalled, takes
a whole step and attends to everything again, each on the next layer and with the same number of threads. A step's ratio is that
to the mean of both full attentions of its round, so that a disturbance of the machine falls on both; configurations take turns
for the same reason. The first round warms and is not counted.

No daemon: pages are in memory of this process, arranged as chunks are. Main thread of a command.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import kvpool_client as kv
import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool.units import format_size
from kvpool_sparse import SparseConfig
from kvpool_tools.bench.daemon import memory_available_bytes
from kvpool_tools.bench.lookup_attention.choice import PERCENT, Choice, Sizes
from kvpool_tools.bench.lookup_attention.device_steps import measure_device, missing_device
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence, Timed
from kvpool_tools.bench.lookup_attention.paths import measure_building, measure_paths
from kvpool_tools.bench.lookup_attention.timings import milliseconds, ratios
from kvpool_tools.bench.measure import median, rates

Row = dict[str, object]
Advance = Callable[[int], None]
# As `Report.measure`.
Measure = Callable[[str, str, Callable[[Advance], Sequence[Row]]], None]
BUILDING_TITLE = "summaries of pages, on one thread, against reading them"
STEPS_TITLE = "one layer and step, against full attention and plain reading of the same run"
DEVICE_TITLE = "steps of all layers on a device, by layer, with queries that drift"
PATHS_TITLE = "each instruction set that this processor has"
# Of the memory that is available: KV and what is beside it.
MEMORY_SHARE = 0.8
BESIDE_KV = 1.05
DENSE_BAR = 0.55
RECALL_BAR_MS, CHOICE_BAR_MS = 1.0, 0.4
# By resident set and budget, where it is known: what reading so many bytes less can give.
STEP_BARS = {(1024, 7192, 0.05): 5.0, (1024, 7192, 0.2): 2.5, (128, 1024, 0.05): 8.0}
BAR_THREADS = 2


def bench_sparse(choice: Choice, measure: Measure, note: Callable[[str], None]) -> None:
    """Tables of building, of steps, and of instruction sets where asked for. Raises InvalidArgument where memory is short."""
    sizes = choice.sizes
    check_memory(sizes)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        nowhere = os.path.join(directory, "none.sock")
        with kv.connect(nowhere, model="bench-sparse", revision="1", layout=sizes.layout) as pool:
            sequence = MeasuredSequence(pool, sizes)
            measure("summaries", BUILDING_TITLE, lambda advance: [measure_building(sequence, advance)])
            for threads in choice.threads:
                name = f"sparse, {threads} thread{'s' if threads > 1 else ''}"
                measure(
                    name,
                    STEPS_TITLE,
                    lambda advance, threads=threads: _measure_steps(sequence, choice, threads, advance),  # type: ignore[misc]
                )
            if choice.paths:
                first, threads = choice.configs[0], choice.threads[-1]
                sequence.become(first, threads)
                measure("paths", PATHS_TITLE, lambda advance: measure_paths(sequence, choice.rounds, advance))
            if (reason := missing_device()) is None:
                measure(
                    "sparse, device", DEVICE_TITLE, lambda advance: measure_device(sequence, choice, "cuda", advance)
                )
            huge = sequence.huge_bytes() / (sizes.layer_kv_bytes * sizes.layers)
            sequence.close()
    note(
        f"{sizes.layers} layers of {format_size(sizes.layer_kv_bytes)} in turn, {min(1.0, huge):.0%} of them in huge pages; "
        f"summaries by {kvpool_native.sparse_path()}, attention by {kvpool_native.attention_path()}"
    )
    if reason is not None:
        note(f"no steps on a device: {reason}")


def check_memory(sizes: Sizes) -> None:
    """Check that the KV fits into memory. Raises InvalidArgument."""
    needed = int(sizes.layers * sizes.layer_kv_bytes * BESIDE_KV)
    room = int(memory_available_bytes() * MEMORY_SHARE)
    if needed > room:
        raise InvalidArgument(
            f"{sizes.layers} layers of {sizes.tokens} tokens take {format_size(needed)}, "
            f"and {format_size(room)} of memory may be used: take fewer by --layers or --tokens"
        )


@dataclass(slots=True)
class _Rounds:
    """Results of one configuration. Invariant: every list has one entry for each counted round."""

    config: SparseConfig
    threads: int
    read: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    choice: list[float] = field(default_factory=list)
    sparse: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    dense_cpu: list[float] = field(default_factory=list)
    step_cpu: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    dense_heads: int = 0
    kept_mass: float = 0.0

    def run(self, sequence: MeasuredSequence, *, is_counted: bool) -> None:
        """One round."""
        sequence.become(self.config, self.threads)
        read = sequence.timed_read(sequence.next_layer())
        first = sequence.timed_dense(sequence.next_layer(), sequence.query())
        recall = sequence.timed_recall(sequence.next_layer(), sequence.query())
        choice = sequence.timed_choice(sequence.next_layer(), sequence.query())
        sparse = sequence.timed_sparse(sequence.next_layer(), sequence.query())
        step = sequence.timed_step(sequence.next_layer(), sequence.query())
        last = sequence.timed_dense(sequence.next_layer(), sequence.query())
        if is_counted:
            self._count(sequence, [read, first, recall, choice, sparse, step, last])

    def _count(self, sequence: MeasuredSequence, found: list[Timed]) -> None:
        read, first, recall, choice, sparse, step, last = found
        self.read.append(read[0])
        self.dense.append((first[0] + last[0]) / 2)
        self.recall.append(recall[0])
        self.choice.append(choice[0])
        self.sparse.append(sparse[0])
        self.step.append(step[0])
        self.dense_cpu.append((first[1] + last[1]) / 2)
        self.step_cpu.append(step[1])
        self.cpu_s += sum(cpu_s for _, cpu_s in found)
        counts = sequence.tally.as_dict()
        self.dense_heads += int(counts["dense_heads"])
        self.kept_mass = float(counts["kept_mass"])


def _measure_steps(sequence: MeasuredSequence, choice: Choice, threads: int, advance: Advance) -> list[Row]:
    every = [_Rounds(config, threads) for config in choice.configs]
    for number in range(choice.rounds + 1):
        for rounds in every:
            rounds.run(sequence, is_counted=number > 0)
        advance(choice.rounds + 1)
    rows = []
    for rounds in every:
        sequence.become(rounds.config, rounds.threads)
        rows.append(_row(rounds, choice.sizes, sequence.attended_bytes(), sequence.summary_bytes()))
    return rows


def _row(rounds: _Rounds, sizes: Sizes, attended_bytes: int, summary_bytes: int) -> Row:
    config = rounds.config
    has_bars = sizes.has_bars and rounds.threads == BAR_THREADS
    bar = STEP_BARS.get((config.init_tokens, config.local_tokens, config.topk_share))
    resident = f"{config.init_tokens}+{config.local_tokens}"
    return {
        "name": f"{config.topk_share * PERCENT:g} % of {resident}",
        "threads": rounds.threads,
        "tokens": sizes.tokens,
        "middle_blocks": config.middle_blocks(sizes.tokens),
        "taken_blocks": config.blocks_to_take(config.middle_blocks(sizes.tokens)),
        "rounds": len(rounds.step),
        **rates("read", [sizes.layer_kv_bytes / seconds / 1e9 for seconds in rounds.read]),
        **milliseconds("dense", rounds.dense),
        **ratios("dense_share_of_read", rounds.read, rounds.dense),
        "dense_share_bar": DENSE_BAR if has_bars else None,
        **milliseconds("recall", rounds.recall),
        "recall_bar_ms": RECALL_BAR_MS if has_bars else None,
        **milliseconds("choice", rounds.choice),
        "choice_bar_ms": CHOICE_BAR_MS if has_bars else None,
        **milliseconds("attention", rounds.sparse),
        **ratios("attention_ratio", rounds.dense, rounds.sparse),
        **milliseconds("step", rounds.step),
        **ratios("ratio", rounds.dense, rounds.step),
        "ratio_bar": bar if sizes.has_bars else None,
        "most_ratio": round(sizes.layer_kv_bytes / (attended_bytes + summary_bytes), 2),
        "dense_read_mib": _mib(sizes.layer_kv_bytes),
        "attended_mib": _mib(attended_bytes),
        "summaries_mib": _mib(summary_bytes),
        "dense_cpu_ms": round(median(rounds.dense_cpu) * 1e3, 2),
        "step_cpu_ms": round(median(rounds.step_cpu) * 1e3, 2),
        "dense_heads": rounds.dense_heads,
        "kept_mass": round(rounds.kept_mass, 3),
        "cpu_seconds": round(rounds.cpu_s, 2),
    }


def _mib(size: int) -> float:
    return round(size / (1 << 20), 1)
