"""Demotion of all chunks that only DRAM has, for an operator or at the daemon's stop, followed by a checkpoint.

Control thread only; it waits for the tier and lets other requests in between.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.clock import Clock, Deadline
from kvpool.states import WriteOrder
from kvpool.tiering.lower_link import LowerLink
from kvpool.tiering.tiering import Tiering
from kvpool.tiers.base import TierState

log = logging.getLogger(__name__)

LOOK_S = 0.005
# An unresponsive disk completes no job: this often the loop checks whether the tier is still in use.
SILENCE_S = 0.5
CHECKPOINT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DemoteOrder:
    """Order to demote all chunks, with its time limit.

    `is_more_coming`: of a stop, which writes the worthiest first, and goes on while saves are still ending; None: of an
    operator. `is_forced`: beyond the write budget. `unsaved`: how many chunks DRAM alone has, for which a tier that is being
    opened is waited for.
    """

    timeout_s: float
    is_more_coming: Callable[[], bool] | None = None
    is_forced: bool = True
    unsaved: Callable[[], int] = lambda: 0


async def demote_all(tiering: Tiering, clock: Clock, order: DemoteOrder) -> tuple[int, bool]:
    """Write what DRAM alone has, as far as the time goes, and checkpoint: how many chunks of what was begun meanwhile the tiers
    have then, and whether all they hold is certain to be there. Of calls at one time the last begins the count.
    """
    written = await asyncio.gather(*(_demote_to(link, clock, order) for link in tiering.lower))
    return sum(count for count, _ in written), all(is_certain for _, is_certain in written)


async def _demote_to(link: LowerLink, clock: Clock, order: DemoteOrder) -> tuple[int, bool]:
    directory = link.slots.directory
    directory.begin_count()
    await _demote_all(link, clock, order)
    is_certain = await _make_certain(link)
    return directory.counted, is_certain


async def _demote_all(link: LowerLink, clock: Clock, order: DemoteOrder) -> None:
    demotions, is_more_coming, deadline = link.demotions, order.is_more_coming, Deadline(order.timeout_s, clock)
    while link.tier.state == TierState.STARTING and not deadline.has_passed():
        if not order.unsaved() and not (is_more_coming is not None and is_more_coming()):
            break
        await asyncio.sleep(LOOK_S)
    demotions.forget_written()
    first = WriteOrder.COLDEST if is_more_coming is None else WriteOrder.WORTHIEST
    while link.tier.can_write and not link.has_lost_job and not deadline.has_passed():
        if demotions.run_all(clock.now_ns(), first, is_forced=order.is_forced):
            await asyncio.sleep(0)
            continue
        is_coming = is_more_coming is not None and is_more_coming()
        if not len(demotions) and not is_coming:
            break
        link.settled.clear()
        longest_s = LOOK_S if is_coming else min(max(deadline.remaining_s(), LOOK_S), SILENCE_S)
        with contextlib.suppress(asyncio.TimeoutError):  # then it checks again
            await asyncio.wait_for(link.settled.wait(), longest_s)
    link.tier.keep_up()


async def _make_certain(link: LowerLink) -> bool:
    """Checkpoint. False where that failed or came late, or more has been written meanwhile."""
    demoted = link.demotions.demoted_chunks
    loop = asyncio.get_running_loop()
    is_complete = await loop.run_in_executor(None, link.tier.checkpoint, CHECKPOINT_TIMEOUT_S)
    if not is_complete:
        log.error("chunks on disk are not certain to be there after a power cut: the last checkpoint is not complete")
        link.run()  # which finds the failure and schedules a retry of the tier
    return is_complete and link.demotions.demoted_chunks == demoted
