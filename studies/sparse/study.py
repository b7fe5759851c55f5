"""Study of the quality of sparse recall: every way on every kind of samples, the bars, and the rule for dense heads.

    python -m studies.sparse.study [--seeds 31,32,33,34] [--model-seed 5] [--quick] [--out DIR] [--json]

Prints a table for each kind of samples; --json prints the document instead, and --out writes it with its plots. With --quick
one seed and one length show that it works, and the small model takes part only if its weights are cached. Main thread only.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvpool.errors import InvalidArgument
from studies.sparse.exact import Exact, Samples, split_tokens
from studies.sparse.local_model import local_model, local_samples, local_text
from studies.sparse.measures import BUDGETS, HeadSpreads, Loss, added, head_spreads, measure, rule_rows
from studies.sparse.methods import METHODS, ORACLE, OracleMethod, clusters_method, make_method
from studies.sparse.synthetic_keys import KINDS, SyntheticOptions, synthetic_samples

Row = dict[str, Any]
Advance = Callable[[int], None]
Losses = dict[str, dict[float, Loss]]

LENGTHS = (8192, 16_384)
SEEDS = (31, 32, 33, 34)
MODEL_SEED = 5
CONSTANT = 150.0
# What is written of samples: outlier channels in any pairs or in fast ones, and constants beside them.
SYNTHETIC: dict[str, dict[str, Any]] = {
    "outliers in random pairs": {"outliers": "random"},
    "outliers in fast pairs": {"outliers": "fast"},
    "constants in slow pairs": {"constants": CONSTANT, "constant_pairs": "slow"},
    "constants in fast pairs": {"constants": CONSTANT, "constant_pairs": "fast"},
}
# What the small model answers with: a way and a budget.
ANSWERED_WITH = (
    (ORACLE, 0.05),
    ("mean", 0.05),
    ("quest", 0.05),
    ("runs4", 0.05),
    ("clusters7", 0.02),
    ("clusters7", 0.05),
    ("clusters7", 0.10),
)
# The bars: the error against that of the mean key from a budget on, and what holds for needles and answers.
ERROR_RATIO_MAX, ERROR_FROM = 0.40, 0.02
NEEDLE_ERROR_RATIO_MAX, NEEDLE_RECALL_MIN, NEEDLE_FROM = 0.25, 0.95, 0.05
ACCURACY_LOSS_MAX = 0.01


class Study:
    """Rows as they are measured, and what the dense rule is judged on. Invariant: `rows` holds all that was measured."""

    def __init__(self, seeds: Sequence[int], lengths: Sequence[int], model_seed: int) -> None:
        self.seeds, self.lengths, self.model_seed = seeds, lengths, model_seed
        self.rows: list[Row] = []
        self.spreads: dict[str, list[HeadSpreads]] = {}

    def synthetic(self, advance: Advance) -> None:
        """Structured keys: every kind of queries and of outlier channels."""
        total = len(SYNTHETIC) * len(KINDS) * len(self.lengths) * len(self.seeds)
        for tokens in self.lengths:
            for name, made in SYNTHETIC.items():
                for kind in KINDS:
                    losses = []
                    for seed in self.seeds:
                        samples = synthetic_samples(SyntheticOptions(seed=seed, tokens=tokens, kind=kind, **made))
                        losses.append(self._losses(samples, tokens, f"synthetic, {name}"))
                        advance(total)
                    self._add(f"synthetic {kind}, {name}", tokens, losses)

    def trained(self, advance: Advance, train: Callable[[], Any]) -> None:
        """The small model: losses of its layers, and answers."""
        from studies.sparse import task_accuracy  # needs torch, an optional heavy dependency
        from studies.sparse.tasks import TASKS

        model = train()
        for tokens in self.lengths:
            layers: dict[str, list[Losses]] = {}
            answers: dict[tuple[str, str, float], list[int]] = {}
            for seed in self.seeds:
                for task in TASKS:
                    read = task_accuracy.read_context(model, seed, task, tokens)
                    for layer, samples in enumerate(task_accuracy.trained_samples(model, read)):
                        losses = self._losses(samples, tokens, "trained")
                        layers.setdefault("trained", []).append(losses)
                        layers.setdefault(f"trained layer {layer}", []).append(losses)
                    asked = len(read.stream.asked)
                    right = {("dense", 1.0): task_accuracy.is_right(model, read)}
                    for way, share in ANSWERED_WITH:
                        observer = task_accuracy.SparseRows(read, way, share)
                        right[way, share] = task_accuracy.is_right(model, read, observer)
                    for (way, share), count in right.items():
                        answers.setdefault((task, way, share), []).extend((count, asked))
                    advance(len(self.lengths) * len(self.seeds) * len(TASKS))
            for name, losses_of in layers.items():
                self._add(name, tokens, losses_of)
            self._add_answers(tokens, answers)

    def local(self, advance: Advance, path: Path) -> None:
        """Layers of a model on this machine."""
        text = local_text()
        for tokens in self.lengths:
            losses = []
            for samples in local_samples(path, text, tokens):
                losses.append(self._losses(samples, samples.keys.shape[1], f"local model {path.name}"))
                advance(0)
            self._add(f"local model {path.name}", tokens, losses)

    def rules(self) -> None:
        """The rule for dense heads, on all that was measured."""
        self.rows += [{"part": "rule", **row} for row in rule_rows(self.spreads)]

    def _losses(self, samples: Samples, tokens: int, population: str) -> Losses:
        """Losses of all ways at all budgets on one set of samples."""
        exact = Exact(samples, split_tokens(tokens))
        middle = samples.middle(exact.split)
        losses = {}
        for name in METHODS:
            method = make_method(name)
            method.summarise(*middle)
            losses[name] = measure(exact, method)
        losses[ORACLE] = measure(exact, OracleMethod(exact))
        clusters = clusters_method()
        clusters.summarise(*middle)
        self.spreads.setdefault(population, []).append(head_spreads(exact, clusters, 0.05))
        return losses

    def _add(self, name: str, tokens: int, losses: Sequence[Losses]) -> None:
        for method in losses[0]:
            for budget, loss in added([by_method[method] for by_method in losses]).items():
                row = {"part": "loss", "samples": name, "tokens": tokens, "method": method, "budget": budget}
                self.rows.append({**row, **loss.columns(), "needles": loss.needles})

    def _add_answers(self, tokens: int, answers: dict[tuple[str, str, float], list[int]]) -> None:
        for (task, method, budget), counts in answers.items():
            asked = sum(counts[1::2])
            row = {"part": "answers", "samples": task, "tokens": tokens, "method": method, "budget": budget}
            self.rows.append({**row, "accuracy": round(sum(counts[::2]) / asked, 4), "asked": asked})


def bar_rows(rows: Sequence[Row]) -> list[Row]:
    """Each bar on each kind of samples: the worst figure over its budgets, and what was wanted."""
    made: list[Row] = []
    losses: dict[tuple[str, int], dict[tuple[str, float], Row]] = {}
    for row in rows:
        if row["part"] == "loss":
            losses.setdefault((row["samples"], row["tokens"]), {})[row["method"], row["budget"]] = row
    for (samples, tokens), by in losses.items():
        where = {"part": "bar", "samples": samples, "tokens": tokens}
        ours = {budget: (by["clusters7", budget], by["mean", budget]) for budget in BUDGETS}
        ratio = max(a["error"] / b["error"] for budget, (a, b) in ours.items() if budget >= ERROR_FROM)
        made.append({**where, **_bar("error / mean's, 2 to 20 %", ratio, "<=", ERROR_RATIO_MAX)})
        if by["clusters7", NEEDLE_FROM]["needles"]:
            needle = [pair for budget, pair in ours.items() if budget >= NEEDLE_FROM]
            ratio = max(a["needle_error"] / b["needle_error"] for a, b in needle)
            recall = min(a["needle_recall"] for a, _ in needle)
            made.append({**where, **_bar("needle error / mean's, from 5 %", ratio, "<=", NEEDLE_ERROR_RATIO_MAX)})
            made.append({**where, **_bar("needle recall, from 5 %", recall, ">=", NEEDLE_RECALL_MIN)})
    answers = {(row["samples"], row["tokens"], row["method"], row["budget"]): row for row in rows if "accuracy" in row}
    for (task, tokens, method, budget), row in answers.items():
        if method == "clusters7" and budget == NEEDLE_FROM:
            loss = answers[task, tokens, "dense", 1.0]["accuracy"] - row["accuracy"]
            where = {"part": "bar", "samples": f"answers, {task} ({row['asked']})", "tokens": tokens}
            made.append({**where, **_bar("accuracy lost at 5 %", loss, "<=", ACCURACY_LOSS_MAX)})
    return made


def _bar(name: str, figure: float, sign: str, wanted: float) -> Row:
    is_met = figure <= wanted if sign == "<=" else figure >= wanted
    return {"bar": name, "figure": round(figure, 4), "wanted": f"{sign} {wanted:g}", "met": "yes" if is_met else "NO"}


def loss_tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """For people: a table for each kind of samples, a line for each way, the error at every budget."""
    for samples, tokens in dict.fromkeys((row["samples"], row["tokens"]) for row in rows if row["part"] == "loss"):
        lines: dict[str, Row] = {}
        for row in rows:
            if row["part"] == "loss" and (row["samples"], row["tokens"]) == (samples, tokens):
                line = lines.setdefault(row["method"], {"method": row["method"]})
                line[f"error {row['budget']:.0%}"] = f"{row['error']:.3f}"
                if row["budget"] == NEEDLE_FROM:
                    named = {"kept": "mass_kept", "needle error": "needle_error", "needle recall": "needle_recall"}
                    shown = {f"{short} 5%": row[name] for short, name in named.items() if row[name] is not None}
                    line.update({name: f"{value:.3f}" for name, value in shown.items()})
        yield f"{samples}, {tokens} tokens", list(lines.values())


def print_tables(rows: Sequence[Row]) -> None:
    """All rows as tables that align."""
    tables = list(loss_tables(rows))
    for part, title in (("answers", "answers of the small model"), ("rule", "dense rule"), ("bar", "bars")):
        found = [{name: value for name, value in row.items() if name != "part"} for row in rows if row["part"] == part]
        tables += [(title, found)] if found else []
    console = Console(width=None if sys.stdout.isatty() else 200)
    for title, lines in tables:
        table = Table(title=title, title_justify="left")
        for name in lines[0]:
            is_word = isinstance(lines[0][name], str) and lines[0][name][:1].isalpha()
            table.add_column(name, justify="left" if is_word else "right")
        for line in lines:
            table.add_row(*(str(value) for value in line.values()))
        console.print(table)


@contextmanager
def _progress(name: str) -> Iterator[Advance]:
    """A progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield lambda total: progress.update(task, advance=1, total=total or None)


def _train(seed: int) -> Any:
    """The small model of a seed, under a progress bar if it is not cached."""
    from studies.sparse.training import trained_model  # needs torch, an optional heavy dependency

    with _progress("training, about ten minutes") as advance:
        return trained_model(seed, lambda total, _right: advance(total))


def _is_cached(seed: int) -> bool:
    try:
        from studies.sparse.training import weights_path  # needs torch, an optional heavy dependency
    except ImportError:
        return False
    return weights_path(seed).exists()


def run(study: Study, *, is_quick: bool) -> None:
    """All parts, each under its bar."""
    path = local_model()
    with _progress("synthetic keys") as advance:
        study.synthetic(advance)
    if not is_quick or _is_cached(study.model_seed):
        model = _train(study.model_seed)
        with _progress("small model") as advance:
            study.trained(advance, lambda: model)
    if path is not None:
        with _progress("local model") as advance:
            study.local(advance, path)
    study.rules()
    study.rows += bar_rows(study.rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.sparse.study", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seeds", default=",".join(map(str, SEEDS)), help="of samples and questions (default: %(default)s)"
    )
    parser.add_argument("--model-seed", type=int, default=MODEL_SEED, help="of the small model (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 8192 tokens: shows that it works, proves nothing"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write sparse.json and the plots there")
    parser.add_argument("--json", action="store_true", help="print the document instead of tables")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    study = Study(seeds[:1] if options.quick else seeds, LENGTHS[:1] if options.quick else LENGTHS, options.model_seed)
    try:
        run(study, is_quick=options.quick)
    except InvalidArgument as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    machine = {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    command = {"seeds": list(study.seeds), "lengths": list(study.lengths), "model_seed": study.model_seed}
    document = {"command": command, "machine": machine, "rows": study.rows}
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        print_tables(study.rows)
    if options.out is not None:
        from studies.sparse.plots import write_plots  # needs matplotlib, an optional heavy dependency

        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sparse.json").write_text(json.dumps(document, indent=2) + "\n")
        write_plots(study.rows, options.out)
    return 0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
