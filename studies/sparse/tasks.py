"""Token streams with questions, for the small model: topic filler, pairs scattered in it, and answers at the end.

A stream never asks for one key twice: an answer that already stands in the window could be read there, and recall would not be
measured. Pure functions of their generator; any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

FILLER = 256
KEYS = 128
VALUES = 128
COPIED = 128
FIRST_KEY = FILLER
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_COPIED = FIRST_VALUE + VALUES
ASK = FIRST_COPIED + COPIED
REPEAT = ASK + 1
START = ASK + 2
VOCABULARY = 648

TASKS = ("needle", "keys", "copy")
TOPICS = 16
TOPIC_TOKENS = 40
SEGMENT_TOKENS = (40, 400)
COPY_TOKENS = (16, 64)
KEYS_ASKED_MAX = 64
# The topics of all streams: which filler each of them is made of.
_TOPIC_SEED = 7_001


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens, where the questions begin, the positions whose next token is an answer, and where each answer stands before."""

    tokens: Ints
    questions_start: int
    asked: Ints
    found_at: Ints


def make_stream(rng: np.random.Generator, task: str, length: int, *, is_longest: bool = False) -> Stream:
    """One stream of `length` tokens, a copied run as long as any if that is asked for. Requires length >= 96."""
    assert length >= 96, "room for questions and filler"
    return _copy_stream(rng, length, is_longest=is_longest) if task == "copy" else _pairs_stream(rng, length, task)


def _filler(rng: np.random.Generator, length: int) -> Ints:
    """Segments of topics, of random length; a topic's tokens have the frequencies of words."""
    topics = np.random.default_rng(_TOPIC_SEED).permuted(np.tile(np.arange(FILLER), (TOPICS, 1)), axis=1)[
        :, :TOPIC_TOKENS
    ]
    frequencies = 1.0 / np.arange(1, TOPIC_TOKENS + 1)
    frequencies /= frequencies.sum()
    parts: list[Ints] = []
    filled = 0
    while filled < length:
        count = int(rng.integers(SEGMENT_TOKENS[0], SEGMENT_TOKENS[1] + 1))
        parts.append(topics[rng.integers(TOPICS)][rng.choice(TOPIC_TOKENS, count, p=frequencies)])
        filled += count
    tokens = np.concatenate(parts)[:length].astype(np.int64)
    tokens[0] = START
    return tokens


def _pairs_stream(rng: np.random.Generator, length: int, task: str) -> Stream:
    count = 1 if task == "needle" else int(min(KEYS_ASKED_MAX, length // 12))
    context = length - 3 * count
    tokens = _filler(rng, context)
    # Places of two tokens each, none twice and not the first.
    places = 2 * rng.choice(np.arange(1, context // 2 - 1), count, replace=False)
    keys = FIRST_KEY + rng.choice(KEYS, count, replace=False)
    values = FIRST_VALUE + rng.integers(0, VALUES, count)
    tokens[places], tokens[places + 1] = keys, values
    order = rng.permutation(count)
    questions = np.stack([np.full(count, ASK), keys[order], values[order]], axis=1).reshape(-1)
    return Stream(
        tokens=np.concatenate([tokens, questions]),
        questions_start=context,
        asked=context + 3 * np.arange(count) + 1,
        found_at=places[order] + 1,
    )


def _copy_stream(rng: np.random.Generator, length: int, *, is_longest: bool) -> Stream:
    longest = min(COPY_TOKENS[1], length // 4)
    count = longest if is_longest else int(rng.integers(COPY_TOKENS[0], longest + 1))
    context = length - 1 - count
    tokens = _filler(rng, context)
    place = int(rng.integers(1, context - count))
    run = FIRST_COPIED + rng.choice(COPIED, count, replace=False)
    tokens[place : place + count] = run
    # The first token of the repeated run is given: nothing says which it is.
    return Stream(
        tokens=np.concatenate([tokens, [REPEAT], run]),
        questions_start=context,
        asked=context + 1 + np.arange(count - 1),
        found_at=place + 1 + np.arange(count - 1),
    )


def gapped_positions(rng: np.random.Generator, length: int, span_max: int) -> Ints:
    """Increasing positions of `length` tokens with random gaps, over at most `span_max`.

    Short streams with such positions teach a model the distances of long ones.
    """
    span = length if span_max <= length else int(np.exp(rng.uniform(np.log(length), np.log(span_max))))
    spare = span - length
    if rng.random() < 0.5:
        # A few jumps, with runs without a gap between them.
        jumps = int(rng.integers(1, 9))
        steps = np.zeros(length)
        steps[rng.integers(1, length, jumps)] = rng.random(jumps)
    else:
        steps = rng.exponential(1.0, length) ** 2
    steps *= spare / max(steps.sum(), 1e-9)
    return np.arange(length) + np.floor(np.cumsum(steps)).astype(np.int64)
