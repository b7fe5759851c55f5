"""What the scheduler's half remembers of one request, from its first question to its end. One thread."""

from kvpool.clock import Deadline
from kvpool_client.key_chain import KeyChain
from kvpool_client.vllm.promise import Answer
from kvpool_client.vllm.surface import EngineRequest


class Tracked:
    """One request. Invariant: `keys` has a key for each whole chunk whose block hashes were known at the last look.

    `chunks_planned`: leading chunks that the pool has or that were put into a plan. `table`: its blocks in order, None while
    they are not known. Each patience runs from the first time that the request was held back for that reason.
    `asked_tokens`: what the answer under way is about, behind `held_tokens`. `has_given_up`: no more questions for this
    request.
    """

    def __init__(self, request: EngineRequest, keys: KeyChain, salt: bytes, adapter: str, chunk_hashes: int) -> None:
        self.request = request
        self.keys = keys
        self.salt = salt
        self.adapter = adapter
        self.hashes: list[bytes] = []
        self.table: list[int] | None = None
        self.chunks_planned = 0
        self.held_tokens = 0
        self.asked_tokens = 0
        self.answer: Answer | None = None
        self.answer_age = Deadline(0.0)
        self.patience_with_save: Deadline | None = None
        self.patience_with_daemon: Deadline | None = None
        self.is_loading = False
        self.has_given_up = False
        self.hit_sources: dict[str, int] = {}
        self._chunk_hashes = chunk_hashes

    def __repr__(self) -> str:
        return f"<Tracked {self.request.request_id} {len(self.hashes)} chunks, {self.chunks_planned} planned>"

    def extend_keys(self) -> None:
        """Take in the chunks that have become whole: the last block hash of each stands for it."""
        known = self.request.block_hashes
        fresh = [
            bytes(known[place])
            for place in range(
                (len(self.hashes) + 1) * self._chunk_hashes - 1,
                len(known) // self._chunk_hashes * self._chunk_hashes,
                self._chunk_hashes,
            )
        ]
        if fresh:
            self.keys.append_hashes(fresh)
            self.hashes += fresh

    def forget_answer(self) -> None:
        """Whatever was asked for is used, or of no use any more."""
        self.answer = None
        self.patience_with_save = self.patience_with_daemon = None
