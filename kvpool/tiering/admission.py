"""Admission to a lower tier: which chunks are worth a write, and how many bytes may be written.

An admission step names the chunks that are written. A chunk is written with its ancestors, so a step holds for whole prefixes.
The write budget bounds the bytes of a day: a bucket that fills evenly. As it runs low the steps become stricter, one after the
other. As it fills they become laxer again, but later, so that they do not alternate. Only whole chunks are stored, so there is
no step for the tails of prompts.

    share of the bucket      1 ------ 0.6 --- 0.5 ------ 0.35 -- 0.25 ------ 0.1 --- too little for a chunk
    as it runs low           ALL -------------| LIKELY ----------| USED_AGAIN ------| NOTHING
    as it fills again        ALL ----|        LIKELY ----|       USED_AGAIN ---|      NOTHING

Metadata only; `now_ns` is an argument. Control thread only.
"""

from collections.abc import Callable
from enum import IntEnum

NS_PER_DAY = 86_400 * 10**9
# An unused budget may be used later, but no more than an hour's: bursts heat and wear a drive.
BURST_FRACTION = 24
# How likely a chunk must be to be used again for LIKELY. Measured by `kvpool_tools.sim` with the step forced, on a trace of
# conversations with 2 % of its blocks in DRAM and 16 % below: 64 % of the writes of ALL for 86 % of the lower tier's hits. With
# 0.15 it is 86 % for 99 %; from 0.3 on it is as strict as USED_AGAIN (24 % for 44 %).
LEAST_CHANCE = 0.2


class Admitted(IntEnum):
    """Admission steps, each a subset of the one before. The native directory uses the same numbers."""

    ALL = 0
    LIKELY = 1  # chunks that the eviction policy expects to be used again, and USED_AGAIN
    USED_AGAIN = 2  # what was touched twice: stored, acquired, or stored again after it was evicted
    NOTHING = 3

    @property
    def word(self) -> str:
        """Its name in statistics."""
        return self.name.lower().replace("_", "-")


# Reasons why a chunk that was evicted from DRAM had not been written: the native directory's `Declined`.
DECLINED = ("unlikely", "used_once", "no_budget", "written_before", "unready")
# More chunks than there are.
UNBOUNDED = 1 << 62
# The step of each value of a tier's option `admission`, while the budget is not low.
POLICIES = {"all": Admitted.ALL, "second-touch": Admitted.USED_AGAIN}
# The shares of the bucket below which a step begins, and above which it ends again: guesses.
BEGINS_BELOW = {Admitted.LIKELY: 0.5, Admitted.USED_AGAIN: 0.25, Admitted.NOTHING: 0.0}
ENDS_AT = {Admitted.LIKELY: 0.6, Admitted.USED_AGAIN: 0.35, Admitted.NOTHING: 0.1}


class WriteBudget:
    """Bucket of bytes that fills evenly over a day. 0 bytes a day: no bound.

    It holds the bytes of an hour, or of one chunk if that is more. Writes that `affordable` allows never overdraw it; a planned
    stop may.
    Invariant: `left` is at most `burst`.
    """

    def __init__(self, bytes_per_day: int, now_ns: int) -> None:
        self._bytes_per_day = bytes_per_day
        self._burst = bytes_per_day / BURST_FRACTION
        self._left = self._burst
        self._seen_ns = now_ns

    def __repr__(self) -> str:
        return f"<WriteBudget {self._left:.0f} of {self._burst:.0f} bytes>"

    def change_rate(self, bytes_per_day: int, now_ns: int) -> None:
        """Fill at another rate from now on; the bucket stays full to the same share."""
        share = self.share(now_ns)
        self._bytes_per_day = bytes_per_day
        self._burst = bytes_per_day / BURST_FRACTION
        self._left = share * self._burst

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""
        return self._bytes_per_day > 0

    @property
    def burst(self) -> float:
        """Bytes that it holds when it is full."""
        return self._burst

    def left(self, now_ns: int) -> float:
        """Bytes that may be written now."""
        earned = max(0, now_ns - self._seen_ns) * self._bytes_per_day / NS_PER_DAY
        self._left = min(self._burst, self._left + earned)
        self._seen_ns = max(self._seen_ns, now_ns)
        return self._left

    def share(self, now_ns: int) -> float:
        """The same as a share of a full bucket; 1 without a bound."""
        return self.left(now_ns) / self._burst if self.is_bounded else 1.0

    def fit(self, size: int) -> None:
        """Make the bucket large enough for a chunk of that size: else none could ever be written."""
        if self.is_bounded and self._burst < size:
            self._left += size - self._burst
            self._burst = size

    def spend(self, size: int, now_ns: int) -> None:
        """Count bytes as written."""
        if self.is_bounded:
            self._left = self.left(now_ns) - size


class Admission:
    """Admission policy with its write budget.

    `floor`: the step while the budget is not low. `knows_chances`: whether the eviction policy knows which chunks are LIKELY;
    if not, the next step replaces that one.
    """

    def __init__(self, floor: Admitted, budget: WriteBudget, knows_chances: Callable[[], bool]) -> None:
        self._floor = floor
        self._budget = budget
        self._knows_chances = knows_chances
        self._tightness = Admitted.ALL  # by the budget alone
        self._wanted = 0  # bytes of a chunk that the budget was too small for
        self.tightened = 0
        self.written_bytes = 0

    def __repr__(self) -> str:
        return f"<Admission {self._tightness.word} {self._budget!r}>"

    def change(self, policy: str, bytes_per_day: int, now_ns: int) -> None:
        """Use another policy, by its name in `POLICIES`, and another budget from now on."""
        self._floor = POLICIES[policy]
        self._budget.change_rate(bytes_per_day, now_ns)

    @property
    def needs_ghosts(self) -> bool:
        """Whether a decision may depend on which chunks were evicted before."""
        return self._budget.is_bounded or self._floor != Admitted.ALL

    def step(self, now_ns: int) -> Admitted:
        """The admission step in force."""
        step = max(self._floor, self._step_of_budget(now_ns))
        return Admitted.USED_AGAIN if step == Admitted.LIKELY and not self._knows_chances() else step

    def affordable(self, size: int, now_ns: int, *, is_ordered: bool = False) -> int:
        """How many chunks of that size may be written now: as many as before the next step begins, at least one.

        `is_ordered`: a request names the chunks; then only the budget counts, not the step.
        """
        if not self._budget.is_bounded:
            return UNBOUNDED
        self._budget.fit(size)
        step = self._step_of_budget(now_ns)
        left = self._budget.left(now_ns)
        count = int(left // size)
        if count <= 0:
            self._wanted = size
            self._step_of_budget(now_ns)
            return 0
        if is_ordered:
            return count
        if step == Admitted.NOTHING:
            return 0
        until_next = left - BEGINS_BELOW[Admitted(step + 1)] * self._budget.burst
        return max(1, int(until_next // size))

    def spend(self, size: int, now_ns: int) -> None:
        """Count bytes as written."""
        self.written_bytes += size
        self._budget.spend(size, now_ns)

    def stats(self, now_ns: int) -> dict[str, int | str]:
        """The step, how often it became stricter, and the bytes that may be written now (0 without a bound)."""
        return {
            "admission": self.step(now_ns).word,
            "admission_tightenings": self.tightened,
            "write_budget_left_bytes": int(self._budget.left(now_ns)),
        }

    def _step_of_budget(self, now_ns: int) -> Admitted:
        if not self._budget.is_bounded:
            return Admitted.ALL
        left, share = self._budget.left(now_ns), self._budget.share(now_ns)
        while self._tightness < Admitted.NOTHING and (
            left < self._wanted or share < BEGINS_BELOW[Admitted(self._tightness + 1)]
        ):
            self._tightness = Admitted(self._tightness + 1)
            self.tightened += 1
        while self._tightness > Admitted.ALL and left >= self._wanted and share >= ENDS_AT[self._tightness]:
            self._tightness = Admitted(self._tightness - 1)
            self._wanted = 0
        return self._tightness
