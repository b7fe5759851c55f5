"""Chunks of a save: which of them each group of the layout stores.

A full group stores all. Windows and states are stored at boundaries alone, the ends of chunks at which a later prompt may go
on: before each a window group stores the chunks that its window covers, a state group the last one. Pure functions; any thread.
"""

from collections.abc import Sequence
from itertools import pairwise

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_client.arguments import as_entries
from kvpool_client.given_numbers import is_index
from kvpool_client.key_chain import KeyChain


def chunks_to_save(
    layout: Layout, keys: KeyChain, chunks: range, *, boundaries: Sequence[int] | None, held: int
) -> tuple[Sequence[int], ...]:
    """Chunks of each group that a save of these chunks of a prompt stores. Raises InvalidArgument.

    `boundaries`: how many chunks each boundary has before it; one with none stores nothing. None: the last one at which a
    token of the prompt is left to be computed, the prompt's end, and the end of the longest hit that a lease of all ranks
    holds (`held` chunks) where the save goes on behind it.
    """
    end, parts = chunks.stop, layout.group_layouts
    if boundaries is None and all(part.is_chained for part in parts):
        return (chunks,) * len(parts)
    if boundaries is None:
        boundaries = [max(0, end - 1), end] if end == len(keys) and not keys.has_tail else [end]
        boundaries += [held] if chunks.start < held < end else []
    boundaries = as_entries("boundaries", boundaries)
    for boundary in boundaries:
        if not is_index(boundary, end):
            raise InvalidArgument(f"boundaries has {boundary!r}, expected numbers of chunks, 0..{end}")
    found: list[Sequence[int]] = []
    for part in parts:
        needed = (range(boundary - part.chunks_of(boundary), boundary) for boundary in boundaries)
        found.append(chunks if part.is_chained else tuple(sorted(set().union(*needed))))
    return tuple(found)


def checked_chunks(chosen: Sequence[Sequence[int]], layout: Layout, count: int) -> tuple[Sequence[int], ...]:
    """Chunks of each group that a caller has chosen, of `count`. Raises InvalidArgument."""
    parts = layout.group_layouts
    if not isinstance(chosen, Sequence) or len(chosen) != len(parts):
        raise InvalidArgument(f"chosen is {chosen!r:.80}, expected the chunks of each of {len(parts)} groups")
    found: list[Sequence[int]] = []
    for number, (chunks, part) in enumerate(zip(chosen, parts, strict=True)):
        if isinstance(chunks, range) and chunks.step == 1 and 0 <= chunks.start <= chunks.stop <= count:
            found.append(chunks)
            continue
        named = as_entries(f"chosen of group {number}", chunks)
        if not all(is_index(chunk, count - 1) for chunk in named) or any(
            after <= before for before, after in pairwise(named)
        ):
            raise InvalidArgument(
                f"chosen of group {number} is {named!r:.80}, expected ascending numbers below {count}"
            )
        if part.is_chained and named and named[-1] - named[0] >= len(named):
            raise InvalidArgument(f"chosen of group {number}, a full one, is {named!r:.80}, expected numbers in a row")
        found.append(tuple(map(int, named)))
    return tuple(found)
