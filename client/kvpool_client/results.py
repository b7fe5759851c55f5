"""What the verbs answer. Miss, pending and declined are results here, never exceptions. Immutable; any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.types import SaveState
from kvpool_client.key_chain import KeyChain

STORED_STATES = (SaveState.STORED, SaveState.PRESENT)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest run of present chunks from the root of a prompt.

    `tiers`: uint8 array, the fastest level of each chunk (0 HBM, 1 DRAM, 2 SSD, 3 peer). A hit is a hint: only
    `acquire` gives a right.
    """

    chunks: int
    tokens: int
    tiers: npt.NDArray[np.uint8]
    keys: KeyChain = field(repr=False)

    def __bool__(self) -> bool:
        return self.chunks > 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How many leading chunks are verified in engine memory, counted from the root, and why the load stopped there.

    `reason`: complete | gone | checksum | timeout | io | disconnected | cancelled.
    """

    chunks: int
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of each chunk of a save. `stored + present + declined` is the number of chunks asked.

    `states[i]`: stored | present | declined. `reasons` counts the declined ones by reason: pending, no-parent, full,
    not-ready, expired, disconnected, timeout, too-long, aborted.
    """

    stored: int
    present: int
    declined: int
    states: tuple[str, ...]
    reasons: Mapping[str, int]

    @classmethod
    def of(cls, states: list[SaveState]) -> "SaveResult":
        """The result of a save whose chunks ended in `states`."""
        assert SaveState.RESERVED not in states
        reasons: dict[str, int] = {}
        words = []
        for state in states:
            is_kept = state in STORED_STATES
            words.append(state.reason if is_kept else "declined")
            if not is_kept:
                reasons[state.reason] = reasons.get(state.reason, 0) + 1
        stored, present = states.count(SaveState.STORED), states.count(SaveState.PRESENT)
        return cls(stored, present, len(states) - stored - present, tuple(words), reasons)
