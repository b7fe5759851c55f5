"""Compute by lookup: decoding over very long contexts, reading only the blocks that matter."""

from kvpool_sparse.config import SparseConfig
from kvpool_sparse.results import Recall, SequenceLost
from kvpool_sparse.sequence import SparseSequence

__all__ = ["Recall", "SequenceLost", "SparseConfig", "SparseSequence"]
