"""Question: one prompt's lookup, asked on the executor's thread and answered on the staging thread.

    ASKED ──taken up──► STAGING ──all is staged, or no more can be──► ENDED
      └────────────────────┴──the executor's deadline has passed──► CLOSED

The executor takes what is verified when it stops waiting, and nothing that arrives later: the staging thread gives that back.

Threads: as each method says. Lock: `_changed` guards all that changes.
"""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.clock import Deadline
from kvpool_client.trtllm.claims.claim import NO_CLAIM, Claim


@dataclass(frozen=True, slots=True)
class Answer:
    """What a lookup has found. `junction`: the chunk up to which full groups have more than the claim, 0 where they do not:
    with windows stored there it would be a hit. `is_late`: the deadline passed before all that is stored was staged.
    `is_unstaged`: some of it had no slot."""

    claim: Claim = NO_CLAIM
    junction: int = 0
    is_late: bool = False
    is_unstaged: bool = False


class Question:
    """See the module. Invariant: `_claim` is verified up to `_staged` on every shard, and both stand once it is closed."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        salt: bytes | None,
        adapter: str,
        *,
        first_chunk: int,
        deadline: Deadline,
    ) -> None:
        """`tokens`: those that may be claimed, int32. `first_chunk`: the engine has the chunks before it."""
        self.tokens = tokens
        self.salt = salt
        self.adapter = adapter
        self.first_chunk = first_chunk
        self.deadline = deadline
        self._changed = threading.Condition()
        self._claim = NO_CLAIM  # guarded by _changed
        self._staged = 0  # guarded by _changed
        self._full_chunks = 0  # guarded by _changed
        self._is_unstaged = False  # guarded by _changed
        self._has_ended = False  # guarded by _changed
        self._is_late = True  # guarded by _changed
        self._is_closed = False  # guarded by _changed

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "ended" if self._has_ended else "asked"
        return f"<Question {state}, {len(self.tokens)} tokens, staged up to chunk {self._staged}>"

    def answer(self) -> Answer:
        """Wait until the question has ended or its deadline has passed, and close it. The executor's thread, once."""
        with self._changed:
            while not self._has_ended and not self.deadline.has_passed():
                self._changed.wait(self.deadline.remaining_s())
            self._is_closed = True
            claim = self._claim.split(self._staged)[0] if self._staged > self.first_chunk else NO_CLAIM
            junction = self._full_chunks if self._full_chunks > claim.end else 0
            return Answer(claim, junction, is_late=self._is_late, is_unstaged=self._is_unstaged)

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits for it any more."""
        with self._changed:
            return self._is_closed

    def note_found(self, *, full_chunks: int = 0, is_unstaged: bool = False) -> None:
        """Note up to which chunk full groups have the prompt, and whether some of a hit has no slot. The staging thread."""
        with self._changed:
            self._full_chunks = max(self._full_chunks, full_chunks)
            self._is_unstaged = self._is_unstaged or is_unstaged

    def begin_staging(self, claim: Claim) -> bool:
        """These chunks are staged from now on. False: nobody waits for them. The staging thread."""
        with self._changed:
            if self._is_closed:
                return False
            self._claim, self._staged = claim, claim.first_chunk
            return True

    def note_staged(self, end: int) -> bool:
        """The claim's chunks before `end` are verified on every shard. False: nobody waits, and they do not count. The staging
        thread."""
        with self._changed:
            if not self._is_closed:
                assert self._staged <= end <= self._claim.end
                self._staged = end
            return not self._is_closed

    def take_rest(self) -> Claim:
        """The part of the claim that is not staged, which is the caller's from now on. The staging thread."""
        with self._changed:
            self._claim, rest = self._claim.split(self._staged)
            return rest

    def end_staging(self, *, is_whole: bool) -> None:
        """No more will be staged; `is_whole`: all that was wanted is. The staging thread."""
        with self._changed:
            self._has_ended = True
            self._is_late = not is_whole and self.deadline.has_passed()
            self._changed.notify()
