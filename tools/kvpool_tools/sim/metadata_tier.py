"""A lower tier without bytes, in the place of the SSD tier: every read and write succeeds, and at once.

What was started is reported by the next `completed`. Nothing of it outlives it, so what should survive a restart is not noted.
One thread.
"""

from collections import deque
from collections.abc import Sequence

import kvpool_native
from kvpool.config.config import Config
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.states import Level
from kvpool.tiers.base import Counters, Finished, Info, JobId, Moves, Outcome, TierOwner, TierState
from kvpool.tiers.slots import Slots, SlotSizes
from kvpool.tiers.ssd.plan import NAME, OUTCOMES_AT_ONCE


class MetadataTier:
    """A tier of `blocks` slots for chunks of `chunk_bytes`, or so much of each of several sizes up to that (`segments`)."""

    name = NAME
    level = Level.SSD
    state = TierState.OK
    headers = None
    can_read = True
    can_write = True
    is_answering = True

    def __init__(self, config: Config, *, blocks: int, chunk_bytes: int, segments: int = 1) -> None:
        slot_bytes = chunk_bytes + kvpool_native.SSD_HEADER_BYTES
        sizes = SlotSizes(blocks * slot_bytes, segments, segments * blocks, header_bytes=kvpool_native.ssd_header_bytes)
        self.slots = Slots(NAME, self.level, sizes)
        self.slots.directory.cap_retained(config.dram.retained_quota)
        self.slots.directory.bound_chains(config.server.max_chain_chunks)
        self.write_policy = config.ssd
        self._jobs = 0
        self._finished: deque[Finished] = deque()

    def __repr__(self) -> str:
        return f"<MetadataTier {self._jobs} jobs, {len(self._finished)} to report>"

    def start(self, namespaces: Namespaces, owner: TierOwner) -> None:
        """Do nothing: it is open, and its owner polls it."""

    async def close(self) -> bool:
        """Nothing is under way."""
        return True

    def reconfigure(self, config: Config) -> None:
        """Nothing of it changes."""

    def read(self, namespace: Namespace, moves: Moves, *, is_urgent: bool) -> JobId:  # noqa: ARG002
        """Every chunk has landed."""
        return self._start(moves)

    def write(self, namespace: Namespace, moves: Moves) -> JobId:  # noqa: ARG002
        """Every chunk is written."""
        return self._start(moves)

    def check(self, namespace: Namespace, moves: Moves) -> JobId:  # noqa: ARG002
        """Every chunk is good."""
        return self._start(moves)

    def completed(self) -> list[Finished]:
        """The chunks of the jobs started, as many at a time as a tier of files has."""
        return [self._finished.popleft() for _ in range(min(OUTCOMES_AT_ONCE, len(self._finished)))]

    @property
    def has_finished(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._finished)

    def remember(self, namespace: Namespace, moves: Moves, chunks: Sequence[int]) -> None:
        """Do nothing: there are no restarts."""

    def touch(self, key: bytes) -> None:
        """Do nothing: there are no restarts."""

    def keep_up(self) -> None:
        """Nothing was remembered; the directory forgets what it would say."""
        self.slots.directory.take_departed()
        self.slots.directory.take_expired()

    def checkpoint(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Do nothing: there are no restarts."""
        return True

    def forget_namespace(self, namespace: Namespace) -> None:
        """Do nothing: there are no records."""

    async def note_flushed(self, namespaces: Sequence[Namespace] | None, generation: int | None) -> bool:  # noqa: ARG002
        """Do nothing: there are no records."""
        return True

    def stats(self) -> Counters:
        """It moves no bytes."""
        return {f"{self.name}.read_bytes": 0, f"{self.name}.written_bytes": 0}

    def info(self) -> Info:
        """Nothing that an operator set."""
        return {}

    def verify(self) -> list[str]:
        """Broken invariants beside those of the slots: there are none."""
        return []

    def problems(self) -> list[str]:
        """Nothing can break."""
        return []

    def shortcomings(self) -> list[str]:
        """Nothing can be missing."""
        return []

    def _start(self, moves: Moves) -> JobId:
        self._jobs += 1
        number = JobId(self._jobs)
        self._finished += [Finished(number, chunk, Outcome.DONE) for chunk in range(len(moves))]
        return number
