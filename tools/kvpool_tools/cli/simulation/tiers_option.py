"""Option `--tiers` of `kvpoolctl simulate`: which tiers a node has, and how large they are. Pure; any thread.

    dram                            sizes by --capacity
    dram,ssd                        and by --ssd-ratio or --ssd-capacity
    hbm:1%,dram:5%,ssd:40%          each its own; dram and ssd may be left to the other options

Device memory has its size here alone: there is no other option for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.errors import InvalidArgument
from kvpool_tools.cli.simulation.options import listed

TIERS = ("hbm", "dram", "ssd")
EXPECTED = "dram, hbm and ssd if wanted, each once, with sizes such as hbm:1%,dram:5%,ssd:40%"
DEFAULT_CAPACITIES = "1%,2%,5%,10%,20%"
DEFAULT_SSD_RATIO = 8.0


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of tiers, as they were given. `ssd_ratio` 0.0 and `ssd_capacity` None: no such tier; `hbm_capacity` alike."""

    capacities: tuple[str, ...]
    ssd_ratio: float
    ssd_capacity: str | None
    hbm_capacity: str | None


def parse_tiers(text: str, *, capacity: str | None, ssd_ratio: float | None, ssd_capacity: str | None) -> TierSizes:
    """The sizes by `--tiers` and the options for single tiers, None where these are not given. Raises InvalidArgument."""
    sizes: dict[str, str | None] = {}
    for entry in listed("--tiers", text):
        name, mark, size = (part.strip() for part in entry.partition(":"))
        if name not in TIERS or name in sizes or (mark and not size):
            raise InvalidArgument(f"--tiers is {text!r}, expected {EXPECTED}")
        sizes[name] = size or None
    if "dram" not in sizes:
        raise InvalidArgument(f"--tiers is {text!r}, expected dram among them")
    if "hbm" in sizes and sizes["hbm"] is None:
        raise InvalidArgument(f"--tiers is {text!r}, expected a size of hbm, such as hbm:1%")
    _check_once(text, sizes["dram"], {"--capacity": capacity}, "dram")
    beside = {"--ssd-ratio": ssd_ratio, "--ssd-capacity": ssd_capacity}
    _check_once(text, sizes.get("ssd"), beside, "ssd")
    if "ssd" not in sizes and ssd_capacity is not None:
        raise InvalidArgument("--ssd-capacity goes with --tiers dram,ssd")
    own = sizes["dram"]
    return TierSizes(
        capacities=(own,) if own is not None else listed("--capacity", capacity or DEFAULT_CAPACITIES),
        ssd_ratio=(ssd_ratio or DEFAULT_SSD_RATIO) if "ssd" in sizes else 0.0,
        ssd_capacity=sizes.get("ssd") or ssd_capacity,
        hbm_capacity=sizes.get("hbm"),
    )


def _check_once(text: str, size: str | None, others: Mapping[str, object], tier: str) -> None:
    """A size in `--tiers` stands for the options of its tier."""
    given = next((option for option, value in others.items() if value is not None), None)
    if size is not None and given is not None:
        raise InvalidArgument(f"--tiers {text} has a size of {tier}: leave {given} out")
