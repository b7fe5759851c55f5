"""Pins: blocks that saves still read after their step, each held by one more reference in vLLM's own block pool.

So nothing waits for a save: a request may end, be aborted or preempted meanwhile, and its blocks are reused when the last rank
has reported the end of the save. At most PINNED_SHARE of the blocks are held.

vLLM cannot reset its prefix cache while a block is held, so blocks held by pins alone are taken back before it tries (see
`save_board`).

Invariant: each block of `_held` has a reference for each pin that names it; a pin is removed when `ranks` reports have come.
The scheduler's thread.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.clock import Clock
from kvpool_client.vllm.save_board import SaveBoard
from kvpool_client.vllm.surface import BlockPool

# A pin on a running request costs nothing; on an ended one it takes room from others (guess).
PINNED_SHARE = 0.5
# Where blocks are short vLLM waits this long for a save to end before it preempts a request, which then computes it again.
PIN_WAIT_NS = 50_000_000
# Ends the saves of a worker in this process, within a time: how often each pinned one has ended.
Drain = Callable[[float], Mapping[int, int]]
# What a save may take after it has begun to read: its questions, each up to the time for one, and its copy (guess).
SAVE_QUESTIONS, COPY_S = 2, 0.1
NEEDED = ("blocks", "touch", "free_blocks")


@dataclass(slots=True)
class Pin:
    """One save's blocks, and how many ranks still read them."""

    block_ids: tuple[int, ...]
    ranks_left: int
    begun_ns: int


class Pins:
    """See the module. Without a block pool it holds nothing. `last`: the number of the last pin; `board_path`: of the board on
    which ranks post what their saves read, empty without one; `wait_budget_s`: how long to wait for saves where that is
    necessary.
    """

    def __init__(self, ranks: int, clock: Clock, wait_budget_s: float) -> None:
        self._ranks = ranks
        self._wait_budget_s = wait_budget_s
        self._clock = clock
        self._pool: BlockPool | None = None
        self._drain: Drain | None = None
        self._board: SaveBoard | None = None
        self._pins: dict[int, Pin] = {}
        self._held = 0
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self.board_path = ""
        self.last = 0

    def __repr__(self) -> str:
        return f"<Pins {len(self._pins)} saves, {self._held} blocks>"

    def __bool__(self) -> bool:
        """Whether any block is held."""
        return bool(self._pins)

    @property
    def are_possible(self) -> bool:
        """Whether blocks can be held."""
        return self._pool is not None

    def hold_in(self, pool: BlockPool, drain: Drain | None) -> None:
        """Hold blocks in this pool from now on. `drain`: ends saves where an idle engine is not stepped."""
        self._pool = pool
        self._drain = drain
        if drain is None and self._board is None:
            with contextlib.suppress(OSError):  # without it vLLM's resets fail while saves are under way
                self._board = SaveBoard(self._ranks)
                self.board_path = self._board.path

    def close(self) -> None:
        """Close the board."""
        if self._board is not None:
            self._board.close()

    def free_for_reset(self) -> None:
        """vLLM is about to reset its prefix cache: wait for the saves that read. Requires: pins alone hold blocks.

        In this process all of them end, in other processes those that have not begun are dropped. A save makes two requests,
        and reads between the two.
        """
        if self._drain is not None:
            self.count_ended(self._drain(SAVE_QUESTIONS * self._wait_budget_s + COPY_S))
        elif self._board is not None and self._board.take_back(
            self.last, SAVE_QUESTIONS * self._wait_budget_s + COPY_S, self._clock
        ):
            self.count_ended(dict.fromkeys(self._pins, self._ranks))

    @property
    def must_end_with_requests(self) -> bool:
        """Whether the engine is not stepped after its last request has ended."""
        return self._drain is not None

    def idle(self) -> None:
        """No request is left. Where the engine is not stepped until the next request, end the saves now: vLLM cannot reset its
        prefix cache while blocks are held."""
        if self._drain is not None and self._pins:
            self.count_ended(self._drain(self._wait_budget_s))

    def room(self) -> int:
        """How many more blocks may be held."""
        return int(len(self._pool.blocks) * PINNED_SHARE) - self._held if self._pool is not None else 0

    def hold_blocks(self, block_ids: Sequence[int]) -> int:
        """Hold the blocks; the pin's number. Requires: requests hold them now, and there is room."""
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self.last += 1
        self._pins[self.last] = Pin(tuple(block_ids), self._ranks, self._clock.now_ns())
        self._held += len(block_ids)
        return self.last

    def release_after(self, number: int) -> None:
        """Release the pins after this one: their saves were never ordered."""
        for later in [pin for pin in self._pins if pin > number]:
            self._give_back(self._pins.pop(later))

    def release_pin(self, number: int) -> None:
        """Release this pin: its save was never ordered."""
        self.count_ended({number: self._ranks})

    def count_ended(self, ended: Mapping[int, int]) -> None:
        """Count the ranks that have ended the saves of these pins."""
        if not ended:
            return
        for number, ranks in ended.items():
            pin = self._pins.get(number)
            if pin is None:
                continue
            pin.ranks_left -= ranks
            if pin.ranks_left <= 0:
                del self._pins[number]
                self._give_back(pin)
        oldest = min(self._pins, default=self.last + 1)
        due = [call for last, call in self._calls if last < oldest]
        self._calls = [(last, call) for last, call in self._calls if last >= oldest]
        for call in due:
            call()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call back when every present pin has been released; at once if there is none."""
        if self._pins:
            self._calls.append((self.last, call))
        else:
            call()

    def may_soon_end(self) -> bool:
        """Whether a pin is so young that waiting for it is better than preempting a request."""
        now_ns = self._clock.now_ns()
        return any(now_ns - pin.begun_ns < PIN_WAIT_NS for pin in self._pins.values())

    def are_alone(self) -> bool:
        """Whether pins alone hold blocks, as far as the pool's counters show."""
        assert self._pool is not None
        held = Counter(block for pin in self._pins.values() for block in pin.block_ids)
        free, count = getattr(self._pool, "get_num_free_blocks", None), getattr(self._pool, "num_gpu_blocks", None)
        if callable(free) and count is not None and count - 1 - free() != len(held):  # the null block is never free
            return False
        return all(getattr(self._pool.blocks[block], "ref_cnt", pins) == pins for block, pins in held.items())

    def _give_back(self, pin: Pin) -> None:
        assert self._pool is not None
        self._held -= len(pin.block_ids)
        # The tail first, as vLLM does it, so that shared prefixes are evicted last.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(pin.block_ids)])


def can_be_held(pool: object) -> bool:
    """Whether this block pool counts references that others may take."""
    return all(hasattr(pool, name) for name in NEEDED)
