"""Losses of a way to recall on samples: error of the output, mass kept, needles found and their error, by budget.

Error is the mean over heads and queries of ||sparse - dense|| / ||dense||. The mean is ruled by heads that look at everything;
heads that look for one token are shown apart: those with more than a fifth of their attention on it. The rule for heads that
must be read densely is judged here too. Pure functions; any thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from studies.sparse.exact import BLOCK_TOKENS, Exact, Flags, Floats, Recall, blocks_for
from studies.sparse.methods import ClusterMethod, Method

BUDGETS = (0.01, 0.02, 0.05, 0.10, 0.20)
NEEDLE_MASS_MIN = 0.2


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums of one budget over heads and queries: they add up over samples, and are divided at the end."""

    count: int
    error: float
    mass: float
    mass_best: float
    needles: int
    needles_found: int
    needle_error: float

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Loss)))

    def columns(self) -> dict[str, float | None]:
        """The figures of a row; None where no head looked for a needle."""
        return {
            "error": round(self.error / max(self.count, 1), 4),
            "mass_kept": round(self.mass / self.mass_best, 4) if self.mass_best > 0 else 1.0,
            "needle_error": round(self.needle_error / self.needles, 4) if self.needles else None,
            "needle_recall": round(self.needles_found / self.needles, 4) if self.needles else None,
        }


def errors(exact: Exact, recall: Recall) -> Floats:
    """Relative error of each query and head."""
    return relative(exact.sparse(recall), exact.outputs)


def relative(outputs: Floats, wanted: Floats) -> Floats:
    """||outputs - wanted|| / ||wanted|| over the last axis."""
    size = np.maximum(np.linalg.norm(wanted, axis=-1), np.float32(1e-12))
    return np.asarray(np.linalg.norm(outputs - wanted, axis=-1) / size)


def needle_heads(exact: Exact) -> Flags:
    """Queries and heads that look for a token of a middle block."""
    middle = exact.split.middle
    inside = (exact.samples.needles >= middle.start) & (exact.samples.needles < middle.stop)
    return np.asarray((exact.needle_mass > NEEDLE_MASS_MIN) & inside[:, None])


def measure(exact: Exact, method: Method, budgets: Iterable[float] = BUDGETS) -> dict[float, Loss]:
    """What a method, which has summarised the middle blocks, loses on the samples."""
    mass = exact.block_mass()
    is_needle = needle_heads(exact)
    group = is_needle.shape[1] // mass.shape[1]
    needle_block = (exact.samples.needles - exact.split.init) // BLOCK_TOKENS
    result = {}
    for budget in budgets:
        count = blocks_for(budget, exact.split.middle_blocks)
        recall = method.recall(exact.samples.queries, count)
        error = errors(exact, recall)
        found = np.repeat((recall.blocks == needle_block[:, None, None]).any(axis=-1), group, axis=1)
        best = -np.sort(-mass, axis=-1)[..., :count]
        result[budget] = Loss(
            count=error.size,
            error=float(error.sum()),
            mass=float(np.take_along_axis(mass, recall.blocks, axis=-1).sum()),
            mass_best=float(best.sum()),
            needles=int(is_needle.sum()),
            needles_found=int((found & is_needle).sum()),
            needle_error=float(error[is_needle].sum()),
        )
    return result


def added(losses: Sequence[Mapping[float, Loss]]) -> dict[float, Loss]:
    """Losses of several samples together, by budget."""
    total = dict(losses[0])
    for more in losses[1:]:
        total = {budget: total[budget] + loss for budget, loss in more.items()}
    return total


@dataclass(frozen=True, slots=True)
class Rule:
    """When a head is read densely: the spread is above `spread` in more than half of its blocks, and the tail weighs more than
    `tail` in its output, or the chosen blocks are estimated to have less than `kept` of the blocks' mass."""

    spread: float
    tail: float = 0.0
    kept: float = 2.0


SPREAD_SHARE = 0.5
# By the spread alone, with what recall itself knows, and with what is known after merging.
RULES = {
    "spread": [Rule(spread) for spread in (2.0, 4.0, 6.0, 8.0, 12.0)],
    "spread, kept < 0.99": [Rule(spread, kept=0.99) for spread in (4.0, 6.0, 8.0)],
    "spread, tail > 0.1": [Rule(spread, tail=0.1) for spread in (2.0, 3.0, 4.0, 6.0, 8.0)],
}
# A head is useless to recall with an error above this at 5 %, and good below that. Between them nothing is asked of the rule.
USELESS_ERROR = 0.5
GOOD_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class HeadSpreads:
    """Every query and head [queries, heads] with clusters at one budget: error, spread, weight of the tail, mass kept.

    The spread is half the variance of the logits within clusters, mean over a block's tokens; here that of the middle block.
    """

    kv_heads: int
    error: Floats
    spread: Floats
    tail_weight: Floats
    kept: Floats

    def is_dense(self, rule: Rule) -> Flags:
        """The heads that the rule reads densely."""
        is_doubtful = (self.tail_weight > rule.tail) & (self.kept < rule.kept)
        return np.asarray((self.spread > rule.spread) & is_doubtful)

    def is_dense_group(self, rule: Rule) -> Flags:
        """The KV heads that are read densely because one of their query heads is."""
        flags = self.is_dense(rule)
        return np.asarray(flags.reshape(len(flags), self.kv_heads, -1).any(axis=-1))


def head_spreads(exact: Exact, clusters: ClusterMethod, budget: float) -> HeadSpreads:
    """Every query and head of the samples, at one budget. Requires a method that has summarised the middle blocks."""
    count = blocks_for(budget, exact.split.middle_blocks)
    queries = exact.samples.queries
    recall = clusters.recall(queries, count)
    return HeadSpreads(
        kv_heads=len(exact.samples.keys),
        error=errors(exact, recall),
        spread=np.asarray(np.quantile(clusters.spread(queries), 1 - SPREAD_SHARE, axis=-1), np.float32),
        tail_weight=exact.tail_weight(recall),
        kept=clusters.kept(queries, recall),
    )


def rule_rows(spreads: Mapping[str, Sequence[HeadSpreads]]) -> list[dict[str, object]]:
    """Every rule on every kind of samples.

    `caught` is the share of useless heads that the rule finds, `false_alarms` that of good ones, `dense_kv_heads` its cost: a
    KV head is read densely as soon as one of its query heads asks for it. `error_after` counts dense heads as exact.
    """
    rows: list[dict[str, object]] = []
    for name, sets in spreads.items():
        error = np.concatenate([one.error.reshape(-1) for one in sets])
        useless, good = error > USELESS_ERROR, error <= GOOD_ERROR
        for kind, rules in RULES.items():
            for rule in rules:
                flags = np.concatenate([one.is_dense(rule).reshape(-1) for one in sets])
                groups = np.concatenate([one.is_dense_group(rule).reshape(-1) for one in sets])
                rows.append(
                    {
                        "samples": name,
                        "rule": kind,
                        "spread": rule.spread,
                        "heads": len(error),
                        "useless": round(float(useless.mean()), 4),
                        "caught": round(float(flags[useless].mean()), 4) if useless.any() else None,
                        "false_alarms": round(float(flags[good].mean()), 4) if good.any() else None,
                        "dense_kv_heads": round(float(groups.mean()), 4),
                        "error": round(float(error.mean()), 4),
                        "error_after": round(float(np.where(flags, 0, error).mean()), 4),
                    }
                )
    return rows
