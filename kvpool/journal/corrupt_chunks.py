"""Corrupt chunks: how many were dropped of each model, for operators. Bounded in models. Control thread only."""

from collections import Counter

from kvpool.escaping import escaped

# Models whose corrupt chunks are counted, and those that `kvpoolctl info` names.
CORRUPT_MODELS_MAX = 256
CORRUPT_NAMED = 8


class CorruptChunks:
    """Dropped chunks, by model. Invariant: CORRUPT_MODELS_MAX models at most."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def note_chunks(self, model: str, chunks: int) -> None:
        """Chunks of a model were found corrupt and dropped."""
        if model in self._dropped or len(self._dropped) < CORRUPT_MODELS_MAX:
            self._dropped[model] += chunks

    def info(self) -> dict[str, str]:
        """Models whose chunks were found corrupt and dropped, with their descendants, and how many of each."""
        named = (f"{escaped(model)}:{count}" for model, count in self._dropped.most_common(CORRUPT_NAMED))
        return {"corrupt_chunks_of": ",".join(named)} if self._dropped else {}
