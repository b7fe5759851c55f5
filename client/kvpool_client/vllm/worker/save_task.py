"""Save task: one save order on one rank. Opened, copied, published, and retried where another save was just writing its chunks.

    ORDERED ──open──► OPEN ──commit──► ENDED
                        ▲      └──chunks of it are just being written──► WAITING ──their writer has ended, open──┐
                        └────────────────────────────────────────────────────┼───────────────────────────────────┘
                                                                             └──late──► ENDED, the rest declined

Requests that arrive together and share a prefix are saved together: the first one writes the shared chunks, and the others can
store theirs only after that. An order has chunks of each part of the engine; a plain one is one part. Invariant: a chunk is
reserved again only after its writer has ended; each chunk of each part is counted once, by its final outcome. One thread at a
time.
"""

from collections.abc import Sequence

import numpy as np

from kvpool.clock import Clock, Deadline
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.save import Save
from kvpool_client.vllm.identity.geometry import LayerPlace
from kvpool_client.vllm.plan import SaveOrder
from kvpool_client.vllm.worker.engine_memory import EngineMemory

# Reasons that another writer causes: its own chunks, and those after them.
WAITS_FOR_ANOTHER = {"pending", "no-parent"}


class PartLeft:
    """What a save of one part has left: `chunks` without an outcome, `blocks` in all, each as many. `is_full`: of a part that
    needs every chunk, so that none behind a declined one has an outcome."""

    def __init__(self, chunks: Sequence[int], blocks: Sequence[int], *, is_full: bool) -> None:
        self.chunks = chunks
        self.blocks = blocks
        self.is_full = is_full
        self._stored: set[int] = set()  # behind a pending chunk: found present the next time

    def count_outcomes(self, states: Sequence[str]) -> tuple[int, int]:
        """Drop the chunks that have an outcome. Returns how many of them this task has saved, and how many it found present."""
        end = len(states)
        if self.is_full:
            end = next((place for place, state in enumerate(states) if state == "declined"), end)
        ended = [place for place in range(end) if states[place] != "declined"]
        present = sum(states[place] == "present" and self.chunks[place] not in self._stored for place in ended)
        saved = len(ended) - present
        if len(ended) == len(self.chunks):
            self.chunks = self.blocks = ()
            return saved, present
        self._stored |= {self.chunks[place] for place, state in enumerate(states) if state in ("stored", "part")}
        count = len(self.blocks) // len(self.chunks)
        left = sorted(set(range(len(self.chunks))).difference(ended))
        self.chunks = [self.chunks[place] for place in left]
        self.blocks = [block for place in left for block in self.blocks[place * count : (place + 1) * count]]
        return saved, present


class SaveTask:
    """See the module. `wait_budget_s`: from now on, how long to wait for another writer and for the order's turn."""

    def __init__(self, order: SaveOrder, memory: EngineMemory, *, wait_budget_s: float, clock: Clock) -> None:
        self.order = order
        self.counts: dict[str, int] = {}
        self._memory = memory
        self._deadline = Deadline(wait_budget_s, clock)
        self._left = [
            PartLeft(chunks if is_writer else (), blocks if is_writer else (), is_full=part.is_full)
            for part, chunks, blocks, is_writer in zip(
                memory.geometry.parts, order.chunks, order.block_ids, memory.is_writer_of, strict=True
            )
        ]
        self._save: Save | None = None
        self._declined: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<SaveTask {self.order.request_id} from chunk {self.next_chunk}>"

    @property
    def next_chunk(self) -> int:
        """The first chunk of a full part, from the root on, without an outcome."""
        of_full = [left.chunks[0] for left in self._left if left.is_full and left.chunks]
        return min(of_full, default=len(self.order.hashes))

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self._deadline.has_passed()

    def open(self) -> None:
        """Reserve slots for what has no outcome. One round trip."""
        self._save = self._memory.save(
            keys_of(self.order, self._memory),
            [left.chunks for left in self._left],
            [left.blocks for left in self._left],
            self.order.retention,
        )

    def layer(self, place: LayerPlace) -> None:
        """The engine has written a layer of an order that is open: its bytes may be read."""
        assert self._save is not None
        group, layer = place
        self._save.layer(layer, group)

    def commit(self) -> bool:
        """Copy what is not copied, and publish. False where another writer has to end before the rest can be stored."""
        assert self._save is not None
        result = self._save.commit()
        self._declined = dict(result.reasons)
        self._count("clipped_chunks", result.clipped)
        for left, of_part in zip(self._left, result.groups or (result,), strict=True):
            saved, present = left.count_outcomes(of_part.states)
            self._count("saved_chunks", saved)
            self._count("present_chunks", present)
        if "pending" in self._declined and self._declined.keys() <= WAITS_FOR_ANOTHER:
            return False
        self._count_declined()
        return True

    def waits_for_another(self) -> bool:
        """Whether the chunks that another save was writing are still being written."""
        return self._save is not None and self._save.has_pending()

    def drop(self) -> None:
        """Drop the order: it was not begun, or not again."""
        self._count("dropped_saves", 1)
        self._count_declined()

    def abort(self) -> None:
        """Give the order up; after it has returned, nothing reads its blocks."""
        if self._save is not None:
            self._save.abort()
        self._count_declined()

    def _count_declined(self) -> None:
        for reason, count in self._declined.items():
            self._count(f"declined_chunks_{reason}", count)
        self._declined = {}

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


def keys_of(order: SaveOrder, memory: EngineMemory) -> KeyChain:
    """The keys of an order's chunks, with the token ids of those from its first one on."""
    keys = memory.pool.keys_from_hashes(
        order.hashes[: order.first_chunk],
        memory.geometry.chunk_tokens,
        salt=order.salt,
        adapter=order.adapter,
        adapter_name=order.lora_name or None,
    )
    keys.append_hashes(order.hashes[order.first_chunk :], np.frombuffer(order.tokens, "<i4") if order.tokens else None)
    return keys
