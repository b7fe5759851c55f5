"""Circuit breaker of one peer: whether a request to it is worth its time.

             `failures` in a row                     the back-off's delay has passed
    CLOSED ──────────────────────────► OPEN ──────────────────────────────────────────► HALF_OPEN
       ▲                                ▲      the trial failed, or never reported an end    │
       │                                └────────────────────────────────────────────────────┤
       └─────────────────────────────────────────────────────────────────────────────────────┘
                                          the trial succeeded

Open: no request is sent. Half-open: exactly one, the trial. Each opening in a row waits longer. A peer's new life closes the
breaker (`reset`). An outcome is reported with the `Permit` of its request: one from before the latest change of state counts
for nothing, so that late failures of earlier requests cannot open a breaker that a newer success has closed.

The clock is an argument; nothing here sleeps. One thread.
"""

from dataclasses import dataclass
from enum import Enum

from kvpool.clock import Clock, Deadline
from kvpool.peers.back_off import BackOff, BackOffSettings, Uniform

# In a row, that open the breaker.
FAILURES = 3
# A trial without an outcome has failed after that time.
TRIAL_S = 5.0
BACK_OFF = BackOffSettings(first_s=0.5, most_s=60.0)


class BreakerState(Enum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to send one request; its outcome is reported with it."""

    turn: int


class CircuitBreaker:
    """See the module. `turn` counts changes of state, `opened` how often it opened.

    Invariant: `_until` is set exactly while the breaker is not closed: the end of the pause, or of the trial.
    """

    def __init__(
        self, clock: Clock, random: Uniform, *, failures: int = FAILURES, back_off: BackOffSettings = BACK_OFF
    ) -> None:
        assert failures >= 1
        self._clock = clock
        self._failures_max = failures
        self._back_off = BackOff(back_off, random)
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._until: Deadline | None = None
        self._turn = 0
        self.opened = 0

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.state.value}, opened {self.opened} times>"

    @property
    def state(self) -> BreakerState:
        """The state. An open breaker whose pause is over is open until somebody asks for a permit."""
        return self._state

    @property
    def retry_s(self) -> float:
        """Seconds until a permit may be given; 0 where one is now."""
        return 0.0 if self._until is None else self._until.remaining_s()

    def ask_permit(self) -> Permit | None:
        """A permit for one request; None: the peer is not asked now."""
        if self._state is BreakerState.CLOSED:
            return Permit(self._turn)
        assert self._until is not None
        if not self._until.has_passed():
            return None
        if self._state is BreakerState.HALF_OPEN:
            self._open()  # the trial never ended
            return None
        self._change(BreakerState.HALF_OPEN, TRIAL_S)
        return Permit(self._turn)

    def succeed(self, permit: Permit) -> None:
        """The peer answered, if only with a refusal that is no fault of its health."""
        if permit.turn != self._turn:
            return
        self._failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self.reset()

    def fail(self, permit: Permit) -> None:
        """The request failed: no answer in time, a broken connection, bad bytes."""
        if permit.turn != self._turn:
            return
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._failures_max:
            self._open()

    def reset(self) -> None:
        """Close: the trial succeeded, or the peer has begun a new life."""
        self._back_off.succeed()
        self._failures = 0
        if self._state is not BreakerState.CLOSED:
            self._change(BreakerState.CLOSED, None)

    def verify(self) -> None:
        """Assert the invariant."""
        assert (self._until is None) == (self._state is BreakerState.CLOSED)
        assert self._failures < self._failures_max or self._state is not BreakerState.CLOSED

    def _open(self) -> None:
        self.opened += 1
        self._failures = 0
        self._change(BreakerState.OPEN, self._back_off.fail())

    def _change(self, state: BreakerState, wait_s: float | None) -> None:
        self._state = state
        self._turn += 1
        self._until = None if wait_s is None else Deadline(wait_s, self._clock)
