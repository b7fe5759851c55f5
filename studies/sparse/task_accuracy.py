"""Accuracy of the small model with sparse attention, and the samples that its layers give.

The context is read densely, as a prefill is. Then the questions run on its keys and values; at the positions whose next token
is an answer, every layer attends to the resident tokens, the recalled blocks and the tail alone. Each key is asked once. Needs
torch; main thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from studies.sparse.exact import Exact, Floats, Ints, Samples, Split, blocks_for, split_tokens
from studies.sparse.methods import ORACLE, OracleMethod, make_method
from studies.sparse.tasks import Stream, make_stream
from studies.sparse.tiny_model import TinyModel

Kept = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Read:
    """A stream whose context the model has read: keys and values of each layer, and the middle blocks."""

    stream: Stream
    kept: Kept
    split: Split

    @property
    def needles_in_middle(self) -> Ints:
        """Which questions have their answer in a middle block."""
        middle = self.split.middle
        return np.flatnonzero((self.stream.found_at >= middle.start) & (self.stream.found_at < middle.stop))


def read_context(model: TinyModel, seed: int, task: str, tokens: int) -> Read:
    """A stream of a seed, its context read densely."""
    rng = np.random.default_rng([seed, tokens, sum(task.encode())])
    stream = make_stream(rng, task, tokens, is_longest=True)
    context = torch.from_numpy(stream.tokens[None, : stream.questions_start])
    with torch.inference_mode():
        _, kept = model(context, torch.arange(context.shape[1])[None])
    return Read(stream, kept, split_tokens(tokens))


def _ask(model: TinyModel, read: Read, observer: "SparseRows | _Capture | None") -> Ints:
    """The model's answers."""
    stream, start = read.stream, read.stream.questions_start
    questions = torch.from_numpy(stream.tokens[None, start:])
    positions = torch.arange(start, len(stream.tokens))[None]
    with torch.inference_mode():
        logits, _ = model(questions, positions, past=read.kept, observer=observer, before=int(stream.tokens[start - 1]))
    return np.asarray(logits[0, stream.asked - start].argmax(-1).numpy(), dtype=np.int64)


def is_right(model: TinyModel, read: Read, observer: "SparseRows | None" = None) -> int:
    """Number of right answers."""
    answers = read.stream.tokens[read.stream.asked + 1]
    return int((_ask(model, read, observer) == answers).sum())


class _Capture:
    """Observer that keeps the samples of every layer, and changes nothing."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.samples: list[Samples] = []

    def __call__(self, layer: int, q: Tensor, kv: tuple[Tensor, Tensor], attended: Tensor) -> Tensor:
        """Keep them, in the order of layers."""
        assert layer == len(self.samples), "layers in order"
        rows = self._stream.asked - self._stream.questions_start
        self.samples.append(
            Samples(kv[0].numpy(), kv[1].numpy(), _rows(q, rows), self._stream.asked + 1, self._stream.found_at)
        )
        return attended


def trained_samples(model: TinyModel, read: Read) -> list[Samples]:
    """Samples of each layer, at the positions of the answers."""
    capture = _Capture(read.stream)
    _ask(model, read, capture)
    return capture.samples


class SparseRows:
    """Observer that replaces the output at the positions of the answers by that of sparse attention."""

    def __init__(self, read: Read, method: str, share: float) -> None:
        self._read, self._method = read, method
        self._count = blocks_for(share, read.split.middle_blocks)

    def __call__(self, layer: int, q: Tensor, kv: tuple[Tensor, Tensor], attended: Tensor) -> Tensor:  # noqa: ARG002
        """The outputs, sparse where an answer comes next."""
        stream, split = self._read.stream, self._read.split
        rows = stream.asked - stream.questions_start
        samples = Samples(kv[0].numpy(), kv[1].numpy(), _rows(q, rows), stream.asked + 1, stream.found_at)
        exact = Exact(samples, split)
        method = OracleMethod(exact) if self._method == ORACLE else make_method(self._method)
        method.summarise(*samples.middle(split))
        outputs = exact.sparse(method.recall(samples.queries, self._count))
        changed = attended.clone()
        changed[:, torch.from_numpy(rows)] = torch.from_numpy(outputs).transpose(0, 1)
        return changed


def _rows(q: Tensor, rows: Ints) -> Floats:
    """Queries [queries, heads, D] of some positions of q [heads, n, D]."""
    return np.ascontiguousarray(q[:, torch.from_numpy(rows)].transpose(0, 1).numpy(), dtype=np.float32)
