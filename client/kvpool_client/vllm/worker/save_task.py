"""Save task: one save order on one rank. Opened, copied, published, and retried where another save was just writing its chunks.

    ORDERED ──open──► OPEN ──commit──► ENDED
                        ▲      └──chunks of it are just being written──► WAITING ──their writer has ended, open──┐
                        └────────────────────────────────────────────────────┼───────────────────────────────────┘
                                                                             └──late──► ENDED, the rest declined

Requests that arrive together and share a prefix are saved together: the first one writes the shared chunks, and the others can
store theirs only after that. Invariant: a chunk is reserved again only after its writer has ended; each chunk is counted once,
by its final outcome. One thread at a time.
"""

import numpy as np

from kvpool.clock import Clock, Deadline
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.results import SaveResult
from kvpool_client.verbs.save import Save
from kvpool_client.vllm.identity.geometry import LayerPlace
from kvpool_client.vllm.plan import SaveOrder, SaveRetention
from kvpool_client.vllm.worker.engine_memory import EngineMemory

NO_RETENTION = SaveRetention((), 0)
# Reasons that another writer causes: its own chunks, and those after them.
WAITS_FOR_ANOTHER = {"pending", "no-parent"}


class SaveTask:
    """See the module. `wait_budget_s`: from now on, how long to wait for another writer and for the order's turn."""

    def __init__(self, order: SaveOrder, memory: EngineMemory, *, wait_budget_s: float, clock: Clock) -> None:
        self.order = order
        self.counts: dict[str, int] = {}
        self._memory = memory
        self._deadline = Deadline(wait_budget_s, clock)
        self._settled = 0
        self._stored_behind: set[int] = set()  # chunks stored behind pending ones: the next save finds them present
        self._save: Save | None = None
        self._declined: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<SaveTask {self.order.request_id} from chunk {self.next_chunk}>"

    @property
    def next_chunk(self) -> int:
        """The first chunk, from the root on, without an outcome."""
        return self.order.first_chunk + self._settled

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self._deadline.has_passed()

    def open(self) -> None:
        """Reserve slots for what is not settled. One round trip."""
        memory, part = self._memory, self._memory.geometry.parts[0]
        retention = self.order.retention or NO_RETENTION
        self._save = memory.pool.save(
            keys_of(self.order, memory, self.next_chunk),
            memory.caches[0],
            self.order.block_ids[0][self._settled * memory.geometry.blocks_of(part) :],
            first_chunk=self.next_chunk,
            retention=retention.ranges,
            prompt_tokens=retention.prompt_tokens,
            decode_priority=retention.decode_priority,
            decode_duration_s=retention.decode_duration_s,
        )

    def layer(self, place: LayerPlace) -> None:
        """The engine has written a layer of an order that is open: its bytes may be read."""
        assert self._save is not None
        self._save.layer(place[1])

    def commit(self) -> bool:
        """Copy what is not copied, and publish. False where another writer has to end before the rest can be stored."""
        assert self._save is not None
        result = self._save.commit()
        assert result is not None
        states = dict(enumerate(result.states, self._settled))
        kept = dict(enumerate(result.states[: _kept(result)], self._settled))
        present = {number for number, state in kept.items() if state == "present"} - self._stored_behind
        self._count("saved_chunks", len(kept) - len(present))
        self._count("present_chunks", len(present))
        self._count("clipped_chunks", result.clipped)
        self._declined = dict(result.reasons)
        if "pending" in self._declined and self._declined.keys() <= WAITS_FOR_ANOTHER:
            self._stored_behind |= {number for number, state in states.items() if state in ("stored", "part")}
            self._settled += len(kept)
            return False
        self._end()
        return True

    def waits_for_another(self) -> bool:
        """Whether the chunks that another save was writing are still being written."""
        return self._save is not None and self._save.has_pending()

    def drop(self) -> None:
        """Drop the order: it was not begun, or not again."""
        self._count("dropped_saves", 1)
        self._end()

    def abort(self) -> None:
        """Give the order up; after it has returned, nothing reads its blocks."""
        if self._save is not None:
            self._save.abort()
        self._end()

    def _end(self) -> None:
        for reason, count in self._declined.items():
            self._count(f"declined_chunks_{reason}", count)
        self._declined = {}

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


def keys_of(order: SaveOrder, memory: EngineMemory, first: int) -> KeyChain:
    """The keys of an order's chunks, with the token ids of those from `first` on."""
    size = memory.geometry.chunk_tokens
    keys = memory.pool.keys_from_hashes(
        order.hashes[:first], size, salt=order.salt, adapter=order.adapter, adapter_name=order.lora_name or None
    )
    ids = np.frombuffer(order.tokens, "<i4")[(first - order.first_chunk) * size :] if order.tokens else None
    keys.append_hashes(order.hashes[first:], ids)
    return keys


def _kept(result: SaveResult) -> int:
    """Leading chunks that the pool has now."""
    return next((number for number, state in enumerate(result.states) if state == "declined"), len(result.states))
