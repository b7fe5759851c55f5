"""Options of `kvpoolctl simulate` for models with windows, and their columns. Pure; any thread."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvpool.errors import InvalidArgument
from kvpool_tools.cli.simulation.rows import Row
from kvpool_tools.sim.cells import Outcome
from kvpool_tools.sim.grouped_cell import GroupedCell
from kvpool_tools.sim.traces import BLOCK_TOKENS

# A simulated model has as few layers as have this share of full ones, at most.
LAYERS_MAX = 64


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A model of `layers` layers, of which `full_layers` are full and the others attend to the last `window_tokens` tokens."""

    window_tokens: int
    full_layers: int
    layers: int

    @classmethod
    def parse(cls, window: int | None, full_share: float | None, **others: Any) -> "GroupOptions | None":
        """The options; None without a window. `others`: what has no meaning beside them, by option. Raises InvalidArgument."""
        if window is None or full_share is None:
            if window is not None or full_share is not None:
                raise InvalidArgument("--window and --full-share belong together: name both, or neither")
            return None
        for option, value in others.items():
            if value:
                raise InvalidArgument(f"--window is for DRAM of one node, {option} has no meaning beside it")
        share = Fraction(full_share).limit_denominator(LAYERS_MAX)
        if not 0 < share < 1:
            raise InvalidArgument(
                f"--full-share is {full_share:g}, expected 1/{LAYERS_MAX} to {LAYERS_MAX - 1}/{LAYERS_MAX}"
            )
        return cls(window, share.numerator, share.denominator)

    def cell(self, policy: str, blocks: int) -> GroupedCell:
        """The cell with the room of so many blocks of all layers."""
        window_blocks = -(-self.window_tokens // BLOCK_TOKENS)
        return GroupedCell(policy, blocks, window_blocks, self.full_layers, self.layers)

    def columns(self, outcome: Outcome, references: int) -> Row:
        """What a row has beside its other columns, for programs."""
        return {
            "window_tokens": self.window_tokens,
            "full_share": round(self.full_layers / self.layers, 6),
            "hit_blocks_groups": outcome.hits,
            "hit_rate_groups": round(outcome.hits / references, 6),
            "holes_groups": outcome.holes,
            "us_per_reference_groups": round(outcome.seconds / references * 1e6, 3),
        }


def readable_groups(row: Row) -> Row:
    """A row for people: what is stored of each block, side by side."""
    return {
        "all layers, all blocks": f"{100 * row['hit_rate']:.2f}%",
        "by groups": f"{100 * row['hit_rate_groups']:.2f}%",
        "points": f"{100 * (row['hit_rate_groups'] - row['hit_rate']):+.2f}",
    }
