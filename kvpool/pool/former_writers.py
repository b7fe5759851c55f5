"""Former writers: connections of former lives of the daemon, which may still write to slots that were reserved for them.

    WITHHELD ──its process has ended, or has connected again and proves the connection its own──► free

A slot that a life leaves in a writer's hands is used for nothing until that writer has stopped: its process is gone, by
the kernel, or connects again; a client stops its saves before it does. How many slots one connection may have was bounded
when they were reserved. What several connections wrote together is withheld until all writers have stopped; what nobody is
known to have written, in a book that is damaged, for good: an unknown holder stands for its writers, through all lives.

Control thread only. Invariant: while anything is withheld, a look at the processes is scheduled, and `_holders` has every
writer that is not proven to have stopped; otherwise neither. It has an unknown one only while its slots may be withheld.
"""

import asyncio
import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvpool.index.holders import Holder, Process, has_ended

# Nobody waits for a look, and a process that has ended stays so (guess).
LOOK_S = 5.0
# Processes in one look: each costs five system calls, 30 us (measured).
LOOKED_AT_ONCE = 32
# In place of a holder's number: the former daemon itself, which has ended; several writers, or nobody in particular.
DAEMON, SEVERAL = 0, (1 << 32) - 1
# Why slots stay withheld, for people.
FOR_GOOD = "for good, since a damaged book does not name who wrote them: a start without kept memory frees them"
UNSEEN = "of processes in another PID namespace: whether they have ended is not seen, their return frees them"


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

    def rename_withheld(self, holder: int, instead: int) -> None:
        """What is withheld for a holder is withheld for another one from now on."""
        ...


class FormerWriters:
    """See the module."""

    def __init__(
        self,
        slots: Withholding,
        holders: Iterable[Holder],
        *,
        forget: Callable[[int], None],
        on_room: Callable[[], None],
    ) -> None:
        """`holders`: those of former lives; unless one is unknown, they are all there were. The last one stands for what
        connections of the life before wrote together. `forget`: called with the number of
        each that has stopped, or has nothing that matters. `on_room`: called when slots have become free, but not in here.

        REQUIRES: the former daemon has ended. Looks at all processes once.
        """
        self._slots = slots
        self._holders = {holder.number: holder for holder in holders}
        self._forget = forget
        self._on_room = on_room
        self._next: asyncio.TimerHandle | None = None
        self._seen = 0  # of `_holders`, in the order of their numbers, up to which one the last look came
        slots.release_withheld(DAEMON)
        if self._holders:
            slots.rename_withheld(SEVERAL, max(self._holders))
        if not self._has_unknown:  # the connection of another one had ended
            for share in slots.withheld():
                if share.holder not in self._holders:
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

    def note_return(self, former: Iterable[tuple[int, bytes]], *, pid: int, user: int) -> None:
        """A process of a user has connected, and says that it has stopped what it wrote as these connections: their numbers and
        proofs. Believed of its own alone: those that cannot be seen from here all have the same pid."""
        stopped = []
        for number, proof in former:
            holder = self._holders.get(number)
            if holder is None or not holder.is_connection or (holder.process.pid, holder.user) != (pid, user):
                continue
            if hmac.compare_digest(holder.proof, proof):
                stopped.append(holder)
        if stopped and self._release(stopped):
            self._on_room()

    def report(self) -> dict[str, int | str]:
        """For operators: what is withheld, for how many connections of former lives, and why some of it stays so; nothing where
        that is nothing."""
        rows = self._slots.withheld()
        if not rows:
            return {}
        stays = [
            f"{slots} {why}" for slots, why in ((self._slots_of_unknown(), FOR_GOOD), (self._unseen(), UNSEEN)) if slots
        ]
        return {
            "dram_withheld_slots": sum(share.slots for share in rows),
            "dram_withheld_bytes": sum(share.bytes for share in rows),
            "dram_former_writers": len(self._connections),
            **({"dram_withheld_for": "; ".join(stays)} if stays else {}),
        }

    def verify(self) -> list[str]:
        """Broken invariants, and what is withheld for good, one line each."""
        withheld = {share.holder for share in self._slots.withheld()}
        if self._has_unknown and withheld <= self._connections.keys():
            return ["former writers: no slot is an unknown one's, and one is there"]
        unknown = withheld.difference(self._holders)
        if (unknown and not self._has_unknown) or (withheld and not self._holders):
            return [f"former writers: slots are withheld for {sorted(withheld)}, {sorted(self._holders)} are known"]
        if self._holders and not withheld:
            return ["former writers: nothing is withheld, and holders are known"]
        slots = self._slots_of_unknown()
        return [f"former writers: {slots} slots are withheld {FOR_GOOD}"] if slots else []

    @property
    def holders(self) -> list[Holder]:
        """Those that are not proven to have stopped, and have slots."""
        return list(self._holders.values())

    @property
    def _connections(self) -> dict[int, Holder]:
        return {number: holder for number, holder in self._holders.items() if holder.is_connection}

    @property
    def _has_unknown(self) -> bool:
        return any(holder.is_unknown for holder in self._holders.values())

    def _members_of(self, joint: Holder) -> list[Holder]:
        """The connections that a joint holder stands for, and may still write."""
        return [holder for number, holder in self._connections.items() if joint.first <= number < joint.number]

    def _slots_of_unknown(self) -> int:
        """How many nobody can free any more."""
        if not self._has_unknown:
            return 0
        return sum(share.slots for share in self._slots.withheld() if share.holder not in self._connections)

    def _unseen(self) -> int:
        """How many a process alone can free that cannot be seen from here."""
        unseen = {number for number, holder in self._connections.items() if not holder.process.pid}
        if not self._has_unknown:
            joint = [holder for holder in self._holders.values() if holder.first]
            unseen.update(
                one.number for one in joint if any(member.number in unseen for member in self._members_of(one))
            )
        return sum(share.slots for share in self._slots.withheld() if share.holder in unseen)

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
            freed += self._free(holder)
        if not self._has_unknown:
            for holder in [one for one in self._holders.values() if one.first and not self._members_of(one)]:
                freed += self._free(holder)
        withheld = {share.holder for share in self._slots.withheld()}
        if withheld <= self._connections.keys():
            kept = self._connections.keys() if withheld else ()
            for number in self._holders.keys() - kept:
                self._drop(number)
        return freed

    def _free(self, holder: Holder) -> int:
        freed = self._slots.release_withheld(holder.number)
        self._drop(holder.number)
        return freed

    def _drop(self, number: int) -> None:
        del self._holders[number]
        self._forget(number)
