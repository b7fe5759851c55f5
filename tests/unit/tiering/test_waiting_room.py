"""Waiting for room: requests retry when something moves, or when their time is over."""

import asyncio

from kvpool.tiering.waiting_room import Room

LONG_S = 60.0


async def _wait(room: Room, waiting: int, timeout_s: float, *, is_expected: bool) -> None:
    """Until `waiting` requests have waited."""
    tasks = [asyncio.ensure_future(room.wait(timeout_s)) for _ in range(waiting)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if is_expected:
        room.wake_requests()
    await asyncio.gather(*tasks)


def test_all_waiting_requests_retry_when_something_has_moved() -> None:
    asyncio.run(asyncio.wait_for(_wait(Room(), 20, LONG_S, is_expected=True), LONG_S / 2))


def test_requests_whose_deadline_has_passed_retry_too() -> None:
    asyncio.run(_wait(Room(), 20, 0.001, is_expected=False))


def test_moves_before_a_wait_do_not_count() -> None:
    async def run() -> bool:
        room = Room()
        room.wake_requests()
        waiting = asyncio.ensure_future(room.wait(LONG_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_over = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return is_over

    assert not asyncio.run(run())
