"""Compute by lookup: decoding over very long contexts, reading only the blocks that matter."""

from kvpool_client.sparse.config import SparseConfig
from kvpool_client.sparse.results import Recall, SequenceLost
from kvpool_client.sparse.sequence import SparseSequence

__all__ = ["Recall", "SequenceLost", "SparseConfig", "SparseSequence"]
