"""Retention of a prompt's chunks: token ranges turned into a priority and a duration for each chunk.

    tokens   0 ─────────── prompt_tokens ──────────►
             │ retention:  the first range that touches a chunk   │ decode_priority: chunks that begin
             │ decides; none: the chunk is as it is by default    │ at or behind the prompt's end

After TensorRT-LLM's KvCacheRetentionConfig: earlier ranges win, a range covers every chunk it touches, `end=None` reaches to
the end of the prompt, the default priority is 35. A chunk that no range covers is left as it is: a new one at the default
priority, a stored one with the retention that it has.

Pure functions; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import InvalidArgument
from kvpool.states import DEFAULT_PRIORITY, KEEP_PRIORITY, PRIORITY_MAX, TokenRange
from kvpool_client.given_numbers import TOKENS_MAX, is_index, is_number

# On the wire a duration is a u32 of milliseconds: 49 days.
DURATION_S_MAX = 4_294_967.0
RANGES_MAX = 4096


@dataclass(frozen=True, slots=True)
class RetentionColumns:
    """Retention of each chunk: uint8 priorities (KEEP_PRIORITY: unchanged) and uint32 milliseconds (0: no end)."""

    priorities: npt.NDArray[np.uint8]
    durations_ms: npt.NDArray[np.uint32]

    @property
    def covered(self) -> npt.NDArray[np.intp]:
        """The chunks that a range covers."""
        return np.flatnonzero(self.priorities != KEEP_PRIORITY)

    def columns_of(self, chunks: Sequence[int]) -> tuple[bytes, bytes]:
        """Both columns of these chunks, as they travel."""
        chosen = slice(chunks.start, chunks.stop) if isinstance(chunks, range) else list(chunks)
        return self.priorities[chosen].tobytes(), self.durations_ms[chosen].astype("<u4").tobytes()

    def columns(self, first: int, count: int) -> tuple[bytes, bytes]:
        """Both columns from chunk `first` on, as they travel; empty where no range covers any of them."""
        chosen = slice(first, first + count)
        if (self.priorities[chosen] == KEEP_PRIORITY).all():
            return b"", b""
        return self.priorities[chosen].tobytes(), self.durations_ms[chosen].astype("<u4").tobytes()


# Where nothing is asked for: of no chunk.
NO_RETENTION = RetentionColumns(np.empty(0, np.uint8), np.empty(0, np.uint32))


def plan_retention(
    retention: Sequence[TokenRange],
    *,
    chunks: int,
    chunk_tokens: int,
    prompt_tokens: int | None = None,
    decode_priority: int | None = None,
    decode_duration_s: float | None = None,
) -> RetentionColumns:
    """Retention of each of `chunks` chunks; NO_RETENTION where none is asked for. `prompt_tokens`: where decoding began; None:
    all of it is prompt.

    Raises InvalidArgument, naming the range, its value and what was expected.
    """
    is_tuple = isinstance(retention, tuple)
    if is_tuple and not retention and prompt_tokens is None and decode_priority is None and decode_duration_s is None:
        return NO_RETENTION
    check_retention(retention, prompt_tokens, decode_priority, decode_duration_s)
    if not retention and decode_priority is None:
        return NO_RETENTION
    prompt = chunks * chunk_tokens if prompt_tokens is None else prompt_tokens
    # A chunk in which decoding begins belongs to the prompt.
    prompt_chunks = min(chunks, -(-prompt // chunk_tokens))
    priorities = np.full(chunks, KEEP_PRIORITY, np.uint8)
    durations_ms = np.zeros(chunks, np.uint32)
    if decode_priority is not None:
        priorities[prompt_chunks:] = decode_priority
        durations_ms[prompt_chunks:] = _milliseconds(decode_duration_s)
    for entry in reversed(retention):
        end = prompt if entry.end is None else min(entry.end, prompt)
        if entry.start >= end:
            continue
        touched = slice(entry.start // chunk_tokens, min(prompt_chunks, -(-end // chunk_tokens)))
        priorities[touched] = entry.priority
        durations_ms[touched] = _milliseconds(entry.duration_s)
    return RetentionColumns(priorities, durations_ms)


def check_retention(
    retention: Sequence[TokenRange],
    prompt_tokens: int | None = None,
    decode_priority: int | None = None,
    decode_duration_s: float | None = None,
) -> None:
    """Raises InvalidArgument, naming the range, its value and what was expected."""
    if isinstance(retention, (str, bytes)) or not isinstance(retention, Sequence) or len(retention) > RANGES_MAX:
        raise InvalidArgument(f"retention is {type(retention).__name__}, expected at most {RANGES_MAX} TokenRanges")
    for number, entry in enumerate(retention):
        name = f"retention[{number}]"
        if not isinstance(entry, TokenRange):
            raise InvalidArgument(f"{name} is {type(entry).__name__}, expected a TokenRange")
        if not is_index(entry.start, TOKENS_MAX):
            raise InvalidArgument(f"{name}.start is {entry.start!r}, expected a token's index from 0")
        if entry.end is not None and (not is_index(entry.end, TOKENS_MAX) or entry.end <= entry.start):
            raise InvalidArgument(f"{name}.end is {entry.end!r}, expected None or more than start {entry.start}")
        _check_priority(f"{name}.priority", entry.priority)
        _check_duration(f"{name}.duration_s", entry.duration_s)
    if prompt_tokens is not None and not is_index(prompt_tokens, TOKENS_MAX):
        raise InvalidArgument(f"prompt_tokens is {prompt_tokens!r}, expected a number of tokens")
    if decode_priority is None:
        if decode_duration_s is not None:
            raise InvalidArgument(f"decode_duration_s is {decode_duration_s!r} without a decode_priority")
        return
    _check_priority("decode_priority", decode_priority)
    _check_duration("decode_duration_s", decode_duration_s)
    if prompt_tokens is None:
        raise InvalidArgument(f"decode_priority is {decode_priority} without prompt_tokens: where does decoding begin?")


def ranges_of_blocks(
    priorities: Sequence[int | None], block_tokens: int, *, first_block: int = 0, duration_s: float | None = None
) -> tuple[TokenRange, ...]:
    """The ranges of an engine's priority for each block from `first_block` on, as TensorRT-LLM's RequestData has them.

    None and the default priority are no range: engines give the default to every block without a priority of its own.
    Priorities out of range are cut.
    """
    ranges: list[TokenRange] = []
    for number, text in enumerate(priorities, first_block):
        if text is None or int(text) == DEFAULT_PRIORITY:
            continue
        start, priority = number * block_tokens, max(0, min(int(text), PRIORITY_MAX))
        if ranges and ranges[-1].end == start and ranges[-1].priority == priority:
            start = ranges.pop().start
        ranges.append(TokenRange(start, (number + 1) * block_tokens, priority, duration_s))
    return tuple(ranges)


def _check_priority(name: str, value: object) -> None:
    if not is_index(value, PRIORITY_MAX):
        raise InvalidArgument(f"{name} is {value!r}, expected 0..{PRIORITY_MAX} (the default is {DEFAULT_PRIORITY})")


def _check_duration(name: str, value: object) -> None:
    if value is None:
        return
    if not is_number(value) or not 0.0 < value <= DURATION_S_MAX:  # type: ignore[operator]  # a number
        raise InvalidArgument(f"{name} is {value!r}, expected None or seconds above 0, at most {DURATION_S_MAX:.0f}")


def _milliseconds(duration_s: float | None) -> int:
    """Milliseconds, rounded up; 0 means no end."""
    return 0 if duration_s is None else -int(-duration_s * 1000 // 1)
