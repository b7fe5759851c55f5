"""Admission: begins waiting requests in their order, as many as there is room for, and ends answered ones."""

from collections import deque

from examples.engine.attention import TILE
from examples.engine.engine import Engine, NoRoom, Running
from examples.engine.workload import Request
from kvpool.clock import Deadline

BATCH = 16
ROOM_WAIT_S = 5.0


def fill(engine: Engine, waiting: deque[Request], running: list[Running], limit: int = BATCH) -> None:
    """Begin waiting requests, until `limit` run or there is no room. Raises NoRoom for one that does not fit alone."""
    deadline = Deadline(ROOM_WAIT_S)  # blocks that are just being saved to the node's pool become room within it
    room = engine.blocks.shape.num_blocks * TILE
    while waiting and len(running) < limit:
        first = waiting[0]
        need = len(first.prompt) + first.answer_tokens - 1
        if need > room or (deadline.has_passed() and not running):
            raise NoRoom(f"request {first.number} of {need} tokens has no room in blocks of {room} tokens")
        if (begun := engine.begin(first)) is not None:
            running.append(begun)
            waiting.popleft()
        elif running:
            return


def end_done(engine: Engine, running: list[Running]) -> None:
    """End the requests whose answer is complete."""
    for done in [one for one in running if one.is_done]:
        engine.end(done)
        running.remove(done)
