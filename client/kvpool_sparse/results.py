"""Results of compute by lookup: what a recall has chosen and estimated, and the error of a sequence whose KV is gone.

Immutable; any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError

Floats = npt.NDArray[np.float32]


# A head is doubtful where so large a share of its blocks is loose (LOOSE_BOUND), and reads everything where its estimate
# weighs more than that; measured (docs/performance.md).
LOOSE_SHARE = 0.5
TAIL_WEIGHT_MAX = 0.1


class SequenceLost(KVPoolError):
    """KV of a sequence that is gone from the pool: what is left is `tokens` tokens from its start.

    The sequence attends no more. A new one with the same tokens finds what the pool still has; the rest is computed
    again.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"the pool has only the first {tokens} tokens of this sequence: close it and compute the rest again"
        )
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Recall:
    """The middle blocks that a query needs, and an estimate of the others: what `SparseSequence.recall` answers.

    `blocks`: int32 [kv_heads, n], ascending numbers of middle blocks. `tail`: None, or `(logit [heads], value [heads,
    head_dim])` in float32: the natural logarithm of the estimated sum of exp(scaled q·k) over the tokens of the
    blocks that were not chosen (-inf where there are none), and the mean of their values under those weights.
    `kept_mass`: float32 [heads], the estimated share of the middle blocks' mass that the chosen ones have.
    `is_dense`: bool [kv_heads], heads all of whose blocks must be read, because they or the query are not finite.
    `is_doubtful`: bool [kv_heads], heads whose keys spread so much inside most blocks that the estimate is
    unreliable: where it weighs more than TAIL_WEIGHT_MAX in the merge, `attend` reads all blocks, and so should
    whoever merges by itself.
    """

    blocks: npt.NDArray[np.int32]
    tail: tuple[Floats, Floats] | None
    kept_mass: Floats
    is_dense: npt.NDArray[np.bool_]
    is_doubtful: npt.NDArray[np.bool_]
