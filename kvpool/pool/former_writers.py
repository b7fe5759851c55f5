"""Former writers: connections of former lives of the daemon, which may still write to slots that were reserved for them.

    WITHHELD ──its process has ended, or has connected again and names the connection──► free

A slot that a life leaves in a writer's hands is used for nothing until that writer has stopped: its process is gone, by
the kernel, or connects again; a client stops its saves before it does. How many slots one connection may have was bounded
when they were reserved. What several connections wrote together is withheld until all writers have stopped; what nobody is
known to have written, in a book that is damaged, for good.

Control thread only. Invariant: while anything is withheld, a look at the processes is scheduled, and `_holders` has every
writer that is not proven to have stopped; otherwise neither.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvpool.index.holders import Holder, Process, has_ended

# Nobody waits for a look, and a process that has ended stays so (guess).
LOOK_S = 5.0
# Processes in one look: each costs five system calls, 30 us (measured).
LOOKED_AT_ONCE = 32
# In place of a holder's number: the former daemon itself, which has ended; several writers, or nobody in particular.
DAEMON, SEVERAL = 0, (1 << 32) - 1


class WithheldShare(Protocol):
    """What one holder may still write: a `kvpool_native.Withheld`."""

    @property
    def holder(self) -> int:
        """Its number, DAEMON or SEVERAL."""
        ...

    @property
    def slots(self) -> int:
        """How many."""
        ...

    @property
    def bytes(self) -> int:
        """Of these."""
        ...


class Withholding(Protocol):
    """The slots that former writers may still write: a `kvpool_native.Directory`."""

    def withheld(self) -> Sequence["WithheldShare"]:
        """What is withheld, by holder."""
        ...

    def release_withheld(self, holder: int) -> int:
        """That holder has stopped; how many slots are free now."""
        ...


class FormerWriters:
    """See the module."""

    def __init__(
        self,
        slots: Withholding,
        holders: Iterable[Holder],
        *,
        is_book_whole: bool = True,
        forget: Callable[[int], None],
        on_room: Callable[[], None],
    ) -> None:
        """`holders`: those of former lives. `is_book_whole`: they are all that were there. `forget`: called with the number of
        each that has stopped, or has nothing that matters. `on_room`: called when slots have become free, but not in here.

        REQUIRES: the former daemon has ended. Looks at all processes once.
        """
        self._slots = slots
        self._holders = {holder.number: holder for holder in holders}
        self._is_book_whole = is_book_whole
        self._forget = forget
        self._on_room = on_room
        self._next: asyncio.TimerHandle | None = None
        self._seen = 0  # of `_holders`, in the order of their numbers, up to which one the last look came
        slots.release_withheld(DAEMON)
        if is_book_whole:  # the connection of another one had ended
            for share in slots.withheld():
                if share.holder not in self._holders and share.holder != SEVERAL:
                    slots.release_withheld(share.holder)
        self._release(self._ended_of(self._holders.values()))

    def __repr__(self) -> str:
        return f"<FormerWriters {len(self._holders)} not proven to have stopped>"

    def start(self) -> None:
        """Look at the processes from time to time, on the running loop, while that matters."""
        if self._next is None and self._holders:
            self._next = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def cancel(self) -> None:
        """Look no more."""
        if self._next is not None:
            self._next.cancel()

    def note_return(self, epoch: bytes, number: int, *, pid: int, user: int) -> None:
        """A process of a user has connected, and says that it has stopped what it wrote as connection `number` of a life.
        Believed of a connection of its own alone."""
        holder = self._holders.get(number)
        if holder is None or (holder.epoch, holder.process.pid, holder.user) != (epoch, pid, user):
            return
        if self._release([holder]):
            self._on_room()

    def report(self) -> dict[str, int]:
        """For operators: what is withheld, and for how many connections of former lives; nothing where that is nothing."""
        rows = self._slots.withheld()
        if not rows:
            return {}
        return {
            "dram_withheld_slots": sum(share.slots for share in rows),
            "dram_withheld_bytes": sum(share.bytes for share in rows),
            "dram_former_writers": len(self._holders),
        }

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        withheld = {share.holder for share in self._slots.withheld()}
        if not self._is_book_whole:
            return []
        unknown = withheld.difference(self._holders, {SEVERAL})
        if unknown or (withheld and not self._holders):
            return [f"former writers: slots are withheld for {sorted(withheld)}, {sorted(self._holders)} are known"]
        return [] if withheld or not self._holders else ["former writers: nothing is withheld, and holders are known"]

    def _look(self) -> None:
        self._next = None
        numbers = sorted(self._holders)
        looked_at = ([n for n in numbers if n > self._seen] + numbers)[:LOOKED_AT_ONCE]
        self._seen = looked_at[-1] if len(numbers) > LOOKED_AT_ONCE else 0
        if self._release(self._ended_of([self._holders[number] for number in dict.fromkeys(looked_at)])):
            self._on_room()
        self.start()

    @staticmethod
    def _ended_of(holders: Iterable[Holder]) -> list[Holder]:
        """Those whose processes have ended; one may have several."""
        known: dict[Process, bool] = {}
        found = []
        for holder in holders:
            if holder.process not in known:
                known[holder.process] = has_ended(holder.process)
            if known[holder.process]:
                found.append(holder)
        return found

    def _release(self, stopped: Iterable[Holder]) -> int:
        """Free the slots of writers that have stopped, and what they were the last to hold back; how many."""
        freed = 0
        for holder in list(stopped):
            freed += self._slots.release_withheld(holder.number)
            self._drop(holder.number)
        if not self._holders and self._is_book_whole:
            freed += self._slots.release_withheld(SEVERAL)
        if not self._slots.withheld():
            for number in list(self._holders):
                self._drop(number)
        return freed

    def _drop(self, number: int) -> None:
        del self._holders[number]
        self._forget(number)
