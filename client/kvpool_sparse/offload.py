"""Offload: the leading chunks of a sequence in the pool, saved in the background and leased for as long as the
sequence lives.

    page full ──save──► stored ──lease, verify──► read where it lies
                  └──declined, daemon away──► the page stays; tried again with the next one

Chunks are saved and leased in their order, one save at a time. A lease ends with its session: once there is another
one, the chunks are looked up and leased again in it, and so they are where their generations show that they are gone.
A daemon that has ended leaves its memory mapped, unchanged: what the next one lacks is no loss, unless that one has taken the
memory over and uses it for others. One thread at a time; a save's own thread touches nothing here.
"""

import contextlib
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError
from kvpool_client.copying.leased_memory import LeasedMemory
from kvpool_client.pool import Pool
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.save import Save
from kvpool_sparse.key_source import KeySource
from kvpool_sparse.pages import Page

GOOD_STATES = ("stored", "present")


@dataclass(slots=True)
class SharedLease:
    """Leased chunks of a sequence and its forks. `good_summaries`: of each chunk; none where the layout has no
    summaries."""

    memory: LeasedMemory
    chunks: int
    good_summaries: npt.NDArray[np.bool_]
    holders: int = field(default=1)

    @property
    def epoch(self) -> bytes:
        """The epoch of the daemon that has leased them."""
        session = self.memory.lease.session
        return session.epoch if session is not None else b""

    def are_current(self) -> bool:
        """Whether all of them are still what was verified."""
        return self.memory.are_current() >= self.chunks

    def let_go(self) -> None:
        """One holder fewer; the last one ends the lease."""
        self.holders -= 1
        if not self.holders:
            with contextlib.suppress(KVPoolError):  # the session has ended, and the lease with it
                self.memory.close()


class Offload:
    """See the module. `lease`: what is leased now, None before the first chunk."""

    def __init__(self, pool: Pool, source: KeySource, lease: SharedLease | None = None) -> None:
        self.pool = pool
        self.source = source
        self.lease = lease
        self._save: Save | None = None
        self._page: Page | None = None  # keeps the memory mapped that is being saved
        self._saved = lease.chunks if lease is not None else 0  # leading chunks that are stored
        self._declined_at = -1  # pages that were due when a save was declined
        self._epoch_without = b""  # of a daemon that lacks some of what is leased from the one before

    @property
    def chunks(self) -> int:
        """Leading chunks that are leased."""
        return self.lease.chunks if self.lease is not None else 0

    def attach(self, most: int) -> range:
        """Lease the leading chunks that the pool has, at most so many, and verify those that were not leased before.

        Returns those that are read at another place from now on: what is new, or everything where none of the lease
        before is left.
        """
        hit = self.pool.lookup(self.source.keys)
        self._saved = min(self._saved, max(hit.chunks, self._live_chunks))
        none = range(self.chunks, self.chunks)
        if min(hit.chunks, most) <= self.chunks:
            return none
        lease = self.pool.acquire(hit)
        if min(lease.chunks, most) <= self.chunks:
            lease.release()
            return none
        memory = self.pool.leased_memory(lease)
        old = self.lease
        first = self.chunks if old is not None and _has_the_same(old, lease) else 0
        good = min(memory.verify(first).chunks, memory.chunks, most)
        if good <= self.chunks:
            memory.close()
            return none
        has_summaries = bool(self.pool.layout.summaries)
        new = memory.good_summaries(first) if has_summaries else np.zeros(memory.chunks - first, np.bool_)
        known = old.good_summaries[:first] if old is not None else np.empty(0, np.bool_)
        self.lease = SharedLease(memory, good, np.concatenate([known, new]))
        self._saved = max(self._saved, good)
        if old is not None:
            old.let_go()
        return range(first, good)

    def reattach(self) -> int:
        """Lease anew what was lost, or what was leased in a session that has ended. How many leading chunks are leased
        now; all of them, as before, where those of a daemon that has ended are read on."""
        lost, self.lease = self.lease, None
        if lost is None:
            return 0
        self._saved = 0
        if not lost.are_current():  # a daemon that has just taken over the memory of the one before has them still
            self.pool.wait_connected()
        self.attach(lost.chunks)
        epoch = self.pool.epoch
        if self.chunks < lost.chunks and epoch != lost.epoch and lost.are_current():
            self._epoch_without = epoch
            lost, self.lease = self.lease, lost
        if lost is not None:
            lost.let_go()
        return self.chunks

    @property
    def must_renew(self) -> bool:
        """Whether the lease has ended with its session, and there is another session that may have the chunks."""
        if self.lease is None or self.lease.memory.lease.is_live:
            return False
        return self.pool.connected and self.pool.epoch != self._epoch_without

    def are_current(self) -> bool:
        """Whether all leased chunks are still what was verified."""
        return self.lease is None or self.lease.are_current()

    def wants(self, due: int) -> int | None:
        """The chunk whose page is to be saved next, of `due` leading ones; None while one is under way, or none may
        be saved now."""
        if self._save is not None or self._saved >= due or self._declined_at == due:
            return None
        self.source.cover(self._saved + 1)
        return self._saved

    def begin_save(self, chunk: int, page: Page) -> None:
        """Begin to save this chunk in the background, out of its page, which is not written until `settle` says so."""
        save = self.pool.save(self.source.keys, first_chunk=chunk, chunks=1, from_=page.whole()[None, :])
        save.commit(wait=False)
        self._save, self._page = save, page

    def end_save(self, due: int, *, wait: bool) -> bool:
        """Take the outcome of the save under way. Whether one has ended now."""
        save = self._save
        if save is None or not (wait or save.done()):
            return False
        self._save = None
        before = self._saved
        state = save.wait().states[0]
        self._page = None
        if state in GOOD_STATES:
            self._saved += 1
            return True
        self._saved = min(before, max(self.pool.lookup(self.source.keys, is_counted=False).chunks, self._live_chunks))
        if self._saved == before:  # else those before are gone, and are saved again
            self._declined_at = due
        return True

    @property
    def _live_chunks(self) -> int:
        """Leading chunks that are leased from the daemon that is there now."""
        return self.chunks if self.lease is not None and self.lease.memory.lease.is_live else 0

    @property
    def stored(self) -> int:
        """Leading chunks that are known to be stored."""
        return self._saved

    def end_exact(self, tokens: int) -> None:
        """Have nobody find what is saved from now on of other tokens than the first `tokens`."""
        begun = max(self._saved + (self._save is not None), self.chunks)
        self.source.end_exact(max(tokens, begun * self.pool.layout.chunk_tokens))

    def fork(self, tokens: int) -> "Offload":
        """The offload of a sequence that has the first `tokens` tokens in common with this one."""
        if self.lease is not None:
            self.lease.holders += 1
        return Offload(self.pool, self.source.fork(tokens), self.lease)

    def close(self) -> None:
        """End the save under way and the lease."""
        if self._save is not None:
            self._save.abort()
            self._save = None
        if self.lease is not None:
            lease, self.lease = self.lease, None
            lease.let_go()
            self.source.give_up()


def _has_the_same(old: SharedLease, lease: Lease) -> bool:
    """Whether a lease has the chunks of an older one where that has them."""
    held, rows, count = old.memory.lease.rows, lease.hold.rows, old.chunks
    return (
        old.memory.lease.session is lease.hold.session
        and np.array_equal(held.offsets[:count], rows.offsets[:count])
        and np.array_equal(held.generations[:count], rows.generations[:count])
    )


def closing_aside(owner: object, offload: Offload) -> "weakref.finalize[[Offload], object]":
    """A watch that closes the offload of a sequence that is dropped without being closed; not when the interpreter
    ends, which ends the connection too."""
    watch = weakref.finalize(owner, _close_aside, offload)
    watch.atexit = False
    return watch


def _close_aside(offload: Offload) -> None:
    """Close on a thread of its own: an object may be collected while this thread has a lock that closing needs."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        threading.Thread(target=offload.close, name="kvpool-sparse-end", daemon=True).start()
