"""Writing down what DRAM alone has, as an operator asks for it or the daemon stops, until a checkpoint has made it certain.

Control thread only; it waits for the tier and lets everybody else in between.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvpool.clock import Clock, Deadline
from kvpool.tiering.tiering import Tiering
from kvpool.types import WriteOrder

log = logging.getLogger(__name__)

LOOK_S = 0.005
# A disk that answers nothing settles nothing: whether it is still in use is looked at so often.
SILENCE_S = 0.5
CHECKPOINT_TIMEOUT_S = 10.0


async def demote_all(
    tiering: Tiering,
    clock: Clock,
    timeout_s: float,
    is_more_coming: Callable[[], bool] | None = None,
    *,
    is_forced: bool = True,
) -> tuple[int, bool]:
    """Write what DRAM alone has, as far as the time goes, and checkpoint: how many chunks of what was begun meanwhile the tier
    has then, and whether all it holds is certain to be there. Of calls at one time the last begins the count.

    `is_more_coming`: of a stop, which writes the worthiest first, and goes on while saves are still ending. `is_forced`: beyond
    the write budget.
    """
    tiering.directory.begin_count()
    await _write_all(tiering, clock, Deadline(timeout_s, clock), is_more_coming, is_forced=is_forced)
    is_certain = await _make_certain(tiering)
    return tiering.directory.counted, is_certain


async def _write_all(
    tiering: Tiering, clock: Clock, deadline: Deadline, is_more_coming: Callable[[], bool] | None, *, is_forced: bool
) -> None:
    demotions = tiering.demotions
    demotions.forget_written()
    order = WriteOrder.COLDEST if is_more_coming is None else WriteOrder.WORTHIEST
    while tiering.can_write and not deadline.has_passed():
        if demotions.run_all(clock.now_ns(), order, is_forced=is_forced):
            await asyncio.sleep(0)
            continue
        is_coming = is_more_coming is not None and is_more_coming()
        if not len(demotions) and not is_coming:
            break
        tiering.settled.clear()
        longest_s = LOOK_S if is_coming else min(max(deadline.remaining_s(), LOOK_S), SILENCE_S)
        with contextlib.suppress(asyncio.TimeoutError):  # then it looks again
            await asyncio.wait_for(tiering.settled.wait(), longest_s)
    tiering.forget_departed()
    tiering.remember_lapsed()


async def _make_certain(tiering: Tiering) -> bool:
    """Checkpoint. False where that failed or came late, or more has been written meanwhile."""
    demoted = tiering.demotions.demoted_chunks
    loop = asyncio.get_running_loop()
    is_complete = await loop.run_in_executor(None, tiering.tier.checkpoint, CHECKPOINT_TIMEOUT_S)
    if not is_complete:
        log.error("chunks on disk are not certain to be there after a power cut: the last checkpoint is not complete")
        tiering.run()  # which finds the failure and has the tier tried again
    return is_complete and tiering.demotions.demoted_chunks == demoted
