"""Tokens that loads are to bring, and how many of them came. The scheduler's thread.

A load's ranks may end in different steps; it counts once, when the last one has ended, and for as many chunks as every rank
has loaded.
"""

from collections import deque

from kvpool_client.vllm.plan import LoadOutcome, shorter_outcome
from kvpool_client.vllm.statistics import Tally, sources_of


class HitsUnderWay:
    """See the module. Invariant: a request's loads end in their order."""

    def __init__(self, tally: Tally, chunk_tokens: int) -> None:
        self._tally = tally
        self._chunk_tokens = chunk_tokens
        self._promised: dict[str, deque[range]] = {}
        self._outcomes: dict[str, LoadOutcome] = {}

    def __repr__(self) -> str:
        return f"<HitsUnderWay of {len(self._promised)} requests>"

    def __len__(self) -> int:
        """Requests with loads that have not ended."""
        return len(self._promised)

    def begin_load(self, request_id: str, tokens: range) -> None:
        """A load that is to bring the request's `tokens`."""
        self._promised.setdefault(request_id, deque()).append(tokens)

    def note_outcome(self, request_id: str, outcome: LoadOutcome) -> None:
        """Some of the load's ranks have ended."""
        if request_id in self._promised:  # not an order that was to fail
            known = self._outcomes.get(request_id, outcome)
            self._outcomes[request_id] = shorter_outcome(known, outcome)

    def end_load(self, request_id: str) -> None:
        """Every rank has ended: count what the load spared, nothing of what the engine computes again."""
        outcome, promised = self._outcomes.pop(request_id, None), self._promised.get(request_id)
        if promised is None:
            return
        tokens, size = promised.popleft(), self._chunk_tokens
        if not promised:
            del self._promised[request_id]
        if outcome is None:
            return
        count = min(tokens.stop, outcome.chunks * size) - tokens.start
        if count > 0:
            self._tally.count("hit_tokens", count)
            for name, amount in sources_of(outcome.tiers, count, tokens.start % size, size).items():
                self._tally.count(f"hit_tokens_{name}", amount)
