"""Queue of waiting requests: gives an engine as many as it has room for, in their order."""

from collections import deque
from collections.abc import Callable, Iterable

from examples.engine.engine import Engine, NoRoom, Running
from examples.engine.workload import Request
from kvpool.clock import Deadline

ROOM_WAIT_S = 5.0


class Queue:
    """See the module. `on_end` is called once for each request that is answered."""

    def __init__(self, requests: Iterable[Request], on_end: Callable[[], None]) -> None:
        self._waiting = deque(requests)
        self._on_end = on_end

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def fill(self, engine: Engine, running: list[Running], limit: int) -> None:
        """Begin waiting requests, until `limit` run or there is no room. Raises NoRoom for one that does not fit alone.

        Blocks that are just being saved to the node's pool become room within the wait.
        """
        deadline = Deadline(ROOM_WAIT_S)
        while self._waiting and len(running) < limit:
            begun = engine.begin(self._waiting[0])
            if begun is not None:
                running.append(begun)
                self._waiting.popleft()
            elif running:
                return
            elif deadline.has_passed():
                first = self._waiting[0]
                raise NoRoom(
                    f"request {first.number} of {len(first.prompt)} + {first.answer_tokens} tokens has no room "
                    f"in {engine.num_blocks} blocks, expected more blocks"
                )

    def end_done(self, engine: Engine, running: list[Running]) -> None:
        """End the requests whose answer is complete."""
        for done in [one for one in running if one.is_done]:
            engine.end(done)
            running.remove(done)
            self._on_end()
