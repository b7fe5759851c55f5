"""Options of every simulation, and capacities: shares, blocks or sizes. Pure; any thread."""

from dataclasses import dataclass

from kvpool.errors import InvalidArgument
from kvpool.units import format_size, parse_size
from kvpool_tools.cli.simulation.group_options import GroupOptions
from kvpool_tools.sim.runner import SimulationSettings

# Blocks are bounded by the native table's indexes.
BLOCKS_MAX = 1 << 28
SHARE_MAX = 10.0


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options for every trace. `ssd_capacity` is used where it is given, else `ssd_ratio`; 0: no such tier. `hbm_capacity`
    None: no device memory. `groups`: the model has windows."""

    capacities: tuple[str, ...]
    policies: tuple[str, ...]
    ssd_ratio: float
    ssd_capacity: str | None
    processes: int
    requests: int | None
    tails: str
    block_bytes: int
    overrides: tuple[str, ...]
    times: str | None = None
    hbm_capacity: str | None = None
    groups: GroupOptions | None = None

    def settings(self, path: str) -> SimulationSettings:
        """What every process needs for a trace."""
        return SimulationSettings(path, self.requests, self.tails, self.block_bytes, self.overrides, self.times)


def parse_blocks(text: str, unique: int, block_bytes: int, *, option: str = "--capacity") -> int:
    """Blocks of a capacity: `5%` or `0.05` of the unique ones, `20000` of them, or a size such as `64GiB`.

    Raises InvalidArgument.
    """
    try:
        share = parse_share(text)
        if share is not None:
            blocks = max(1, int(share * unique))
        else:
            blocks = int(text) if text.isdecimal() else parse_size(text) // block_bytes
    except ValueError as error:  # InvalidArgument is one
        raise InvalidArgument(
            f"{option} has {text!r}, expected a share such as 5% or 0.05, a number of blocks, or a size such as 64GiB"
        ) from error
    if not 0 < blocks <= BLOCKS_MAX:
        raise InvalidArgument(
            f"{option} has {text!r}, {blocks} blocks of {format_size(block_bytes)} ({unique} are unique), "
            f"expected 1 to {BLOCKS_MAX}"
        )
    return blocks


def parse_share(text: str) -> float | None:
    """The share of the unique blocks that a capacity such as `5%` or `0.05` names; None for one that names no share.

    Raises ValueError.
    """
    if text.endswith("%"):
        share = float(text[:-1]) / 100
    elif "." in text and text[-1].isdigit():
        share = float(text)
    else:
        return None
    if not 0.0 < share <= SHARE_MAX:
        raise ValueError(f"share {share}")
    return share


def listed(option: str, text: str) -> tuple[str, ...]:
    """Entries of an option's list. Raises InvalidArgument."""
    entries = tuple(entry.strip() for entry in text.split(","))
    if not all(entries):
        raise InvalidArgument(f"{option} is {text!r}, expected entries with a comma between them")
    return entries


def ssd_blocks_beside(text: str, blocks: int, unique: int, wanted: SimulateOptions) -> int:
    """Blocks of the SSD tier beside `blocks` of capacity `text`. Raises InvalidArgument."""
    ssd_blocks = max(1, int(wanted.ssd_ratio * blocks)) if wanted.ssd_ratio else 0
    if wanted.ssd_capacity is not None:
        ssd_blocks = parse_blocks(wanted.ssd_capacity, unique, wanted.block_bytes, option="--ssd-capacity")
    if ssd_blocks > BLOCKS_MAX:
        raise InvalidArgument(
            f"the SSD tier has {ssd_blocks} blocks beside {blocks} of capacity {text!r}, expected {BLOCKS_MAX} at most"
        )
    return ssd_blocks
