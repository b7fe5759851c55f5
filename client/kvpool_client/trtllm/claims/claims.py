"""Claims: chunks that may be promised to TensorRT-LLM, because they are leased, copied out of the pool and verified before.

The runtime has no way to report a failed load, so a chunk is claimed only when every rank's bytes of it are verified in the
connector's own memory: leased from DRAM, copied into staging with its checksums, and the lease released. The daemon is not
needed afterwards. The price is one more copy in host memory.

    FREE ──taken──► STAGED ──claimed, ordered──► ORDERED ──every rank done──► FREE
                       └──late, wrong or given up──────────────────────────► FREE

The runtime shows a request for the first time when it asks, once, and waits for the answer with everything that it decodes. So
the staging thread does the work (`stager`), one question at a time, and the executor's thread waits for it until a deadline,
which all lookups of an iteration have together.

Invariant: a slot is in exactly one of those states; the ranks write no slot, and the staging thread none that is claimed.
Threads: the executor's, but for `_run`, which is the staging thread's. Lock: `_changed` guards the question asked last.
"""

import threading
from collections import deque
from functools import partial

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool.ids import PAGE_BYTES
from kvpool_client.engines.failure_guard import FailureGuard
from kvpool_client.engines.shared_bytes import SharedBytes
from kvpool_client.trtllm.claims.claim import Claim
from kvpool_client.trtllm.claims.question import Answer, Question
from kvpool_client.trtllm.claims.slots import Slots
from kvpool_client.trtllm.claims.stager import Stager
from kvpool_client.trtllm.claims.staging import shard_bytes_of, staging_slots
from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import ByGroup
from kvpool_client.trtllm.settings import Settings

STOP_TIMEOUT_S = 5.0
# Touched at once: while the kernel does it, no other thread of the process gets new memory.
TOUCHED_BYTES = 16 << 20


class Claims:
    """The staging memory and its thread. `slots`: of each layer group."""

    def __init__(self, settings: Settings, geometry: Geometry, guard: FailureGuard) -> None:
        """Raises KVPoolError or OSError; then nothing is left open."""
        self._guard = guard
        shards = geometry.shards(settings.ranks)
        self.slots = staging_slots(geometry, settings.staging_bytes // shards)
        self._free = Slots(self.slots)
        self._ordered: deque[tuple[int, ByGroup]] = deque()
        self._last_sequence = 0
        self._changed = threading.Condition()
        self._question: Question | None = None  # guarded by _changed
        self._stop = threading.Event()
        self._is_touched = threading.Event()
        self.failure: OSError | None = None
        self.memory = SharedBytes.create("kvpool-staging", shards * shard_bytes_of(geometry, self.slots))
        try:
            self._mapping = self.memory.mapping()
            self._stager = Stager(settings, geometry, memory=self._mapping.view(), counts=self.slots, slots=self._free)
        except BaseException:
            self.memory.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvpool-staging", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._stager.close()
            self.memory.close()
            raise

    def __repr__(self) -> str:
        return f"<Claims {self.slots_free} slots free, {len(self._ordered)} orders under way>"

    @property
    def slots_free(self) -> int:
        """Slots that a claim may take, of the layer group that has the fewest."""
        return min(self._free.free)

    @property
    def is_ready(self) -> bool:
        """Whether all of the staging has its memory: before, each new page of it would stop the copies. `failure` is why it
        never will be."""
        return self._is_touched.is_set()

    def claim(
        self, tokens: npt.NDArray[np.int32], salt: bytes | None, adapter: str, *, first_chunk: int, deadline: Deadline
    ) -> Answer:
        """Stage what DRAM has of the prompt from `first_chunk` on, on every rank, as far as that is done by the deadline. Never
        waits longer. Requires: `is_ready`."""
        question = Question(tokens, salt, adapter, first_chunk=first_chunk, deadline=deadline)
        with self._changed:
            self._question = question  # one that the thread has not taken up is closed
            self._changed.notify()
        return question.answer()

    def give_up_claim(self, claim: Claim) -> None:
        """Give up a claim, or a part of one, that will not be ordered."""
        self._free.give_back_slots(claim.slots)

    def order_claim(self, claim: Claim) -> int:
        """The sequence number of the order that carries this claim out."""
        self._last_sequence += 1
        self._ordered.append((self._last_sequence, claim.slots))
        return self._last_sequence

    def reclaim(self, done: int) -> None:
        """Free the slots of every order up to `done`."""
        while self._ordered and self._ordered[0][0] <= done:
            self._free.give_back_slots(self._ordered.popleft()[1])

    def close(self) -> None:
        """End the thread and the connections."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._stager.close()
        self._thread.join(STOP_TIMEOUT_S)
        self.memory.close()

    def _run(self) -> None:
        try:
            self._touch()
        except OSError as error:
            self.failure = error
            return
        self._is_touched.set()
        while (question := self._next_question()) is not None:
            self._guard.call("stage", None, partial(self._stager.stage, question))

    def _touch(self) -> None:
        """Have the kernel give the staging all of its memory, but for a last part of a page. Raises OSError."""
        end = self._mapping.size // PAGE_BYTES * PAGE_BYTES
        for offset in range(0, end, TOUCHED_BYTES):
            if self._stop.is_set():
                return
            self._mapping.populate(offset, min(TOUCHED_BYTES, end - offset))

    def _next_question(self) -> Question | None:
        """The question that was asked last; None when the thread is to end."""
        with self._changed:
            while self._question is None and not self._stop.is_set():
                self._changed.wait()
            question, self._question = self._question, None
            return None if self._stop.is_set() else question
