"""Save of a layout with groups: a save of each full group's chunks, and one of each chunk of a window or a state.

Windows and states are stored at boundaries alone, the ends of chunks at which a later prompt may go on: before each a window
group stores the chunks that its window covers, a state group the last one. Used from one thread at a time, as a Save is.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Literal, overload

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_client.arguments import as_index
from kvpool_client.key_chain import KeyChain
from kvpool_client.results import SaveResult
from kvpool_client.save import Save, publish_each, started_commit


@dataclass(frozen=True, slots=True)
class GroupSaveResult:
    """Result of `GroupSave.commit`. `groups`: a SaveResult for each group, over the chunks that it was to store, in order."""

    groups: tuple[SaveResult, ...]

    @property
    def stored(self) -> int:
        """Chunks stored, of all groups."""
        return sum(result.stored for result in self.groups)

    @property
    def present(self) -> int:
        """Chunks that were there before."""
        return sum(result.present for result in self.groups)

    @property
    def part(self) -> int:
        """Chunks of which this rank's part was stored, or was there before, and others' are missing."""
        return sum(result.part for result in self.groups)

    @property
    def declined(self) -> int:
        """Chunks that were not stored."""
        return sum(result.declined for result in self.groups)

    @property
    def reasons(self) -> Mapping[str, int]:
        """How many were declined, by reason."""
        found: dict[str, int] = {}
        for result in self.groups:
            for reason, count in result.reasons.items():
                found[reason] = found.get(reason, 0) + count
        return found


class GroupSave:
    """A save of all groups, under way or ended: what `Pool.groups.save` answers. As a Save: announce layers as they are
    written, then commit; leaving it as a context without a commit aborts it. Threads: one at a time."""

    def __init__(self, saves: Sequence[Sequence[Save]], layers: Sequence[int]) -> None:
        """`saves`: of each group, in the order of its chunks; `layers`: how many the engine has of each."""
        self._saves = saves
        self._layers = layers
        self._result: GroupSaveResult | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<GroupSave of {len(self._saves)} groups, {'ended' if self._result else 'under way'}>"

    def __enter__(self) -> "GroupSave":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._result is None and self._thread is None:
            self.abort()

    def layer(self, group: int, layer: int) -> None:
        """The engine's bytes of a group's layer may be read from now on. Any order, once each. Raises InvalidArgument."""
        group = as_index("group", group, len(self._saves) - 1)
        layer = as_index("layer", layer, self._layers[group] - 1)
        for save in self._saves[group]:
            save.layer(layer)

    @overload
    def commit(self, wait: Literal[True] = True) -> GroupSaveResult:
        """Copy, publish and wait."""

    @overload
    def commit(self, wait: bool) -> GroupSaveResult | None:
        """Copy and publish; wait if that is asked for."""

    def commit(self, wait: bool = True) -> GroupSaveResult | None:
        """Copy the layers not announced and publish, in one round trip. When it returns a result, every client sees the stored
        chunks.

        With `wait=False` it returns None at once, or the result where the save has ended, and the rest goes on in the
        background, as of a Save.
        """
        if wait or self._result is not None:
            return self.wait()
        if self._thread is None:
            self._thread = started_commit(self._publish)
        return None if self._thread is not None else self.wait()

    def wait(self) -> GroupSaveResult:
        """Wait for the result of a commit."""
        if self._thread is not None:
            self._thread.join()
        if self._result is None:
            self._publish()
        assert self._result is not None
        return self._result

    def has_pending(self) -> bool:
        """Whether chunks that were pending when this save began still are, in any group. Never waits."""
        return any(save.has_pending() for saves in self._saves for save in saves)

    def done(self) -> bool:
        """Whether the save has ended."""
        return self._result is not None

    def abort(self) -> None:
        """Give the save up: nothing more is read or written, nothing is stored. Idempotent."""
        if self._thread is not None:
            self._thread.join()
        if self._result is None:
            for save in (save for saves in self._saves for save in saves):
                save.abort()
            self._result = self._collected()

    def _publish(self) -> None:
        # Full groups come last: a hit ends where windows and states are, so these are never late.
        publish_each([save for saves in reversed(self._saves) for save in saves])
        self._result = self._collected()

    def _collected(self) -> GroupSaveResult:
        return GroupSaveResult(tuple(_joined([save.wait() for save in saves]) for saves in self._saves))


def chunks_to_save(
    layout: Layout, keys: KeyChain, *, first_chunk: int, end: int, boundaries: Sequence[int] | None, held: int
) -> tuple[tuple[int, ...], ...]:
    """The chunks of each group that a save of chunks `first_chunk` up to `end` stores. Raises InvalidArgument.

    `boundaries`: how many chunks each boundary has before it; one with none stores nothing. None: the last one at which a
    token of the prompt is left to be computed, the prompt's end, and the end of the longest hit that a lease of all ranks
    holds (`held` chunks) where the save goes on behind it.
    """
    if boundaries is None:
        boundaries = [max(0, end - 1), end] if end == len(keys) and not keys.has_tail else [end]
        boundaries += [held] if first_chunk < held < end else []
    for boundary in boundaries:
        if isinstance(boundary, bool) or not isinstance(boundary, int) or not 0 <= boundary <= end:
            raise InvalidArgument(f"boundaries has {boundary!r}, expected numbers of chunks, 0..{end}")
    found: list[tuple[int, ...]] = []
    for role in (part.group for part in layout.group_layouts):
        assert role is not None
        if role.is_full:
            found.append(tuple(range(first_chunk, end)))
            continue
        chosen = {
            chunk
            for boundary in boundaries
            for chunk in range(boundary - role.chunks_of(boundary, layout.chunk_tokens), boundary)
        }
        found.append(tuple(sorted(chosen)))
    return tuple(found)


def checked_chunks(chosen: Sequence[Sequence[int]], layout: Layout, count: int) -> tuple[tuple[int, ...], ...]:
    """Chunks of each group that a caller has chosen, of `count`. Raises InvalidArgument."""
    parts = layout.group_layouts
    if not isinstance(chosen, Sequence) or len(chosen) != len(parts):
        raise InvalidArgument(f"chosen is {chosen!r:.80}, expected the chunks of each of {len(parts)} groups")
    found = []
    for number, (chunks, part) in enumerate(zip(chosen, parts, strict=True)):
        named = tuple(chunks)
        are_numbers = all(
            isinstance(chunk, int) and not isinstance(chunk, bool) and 0 <= chunk < count for chunk in named
        )
        if not are_numbers or any(after <= before for before, after in pairwise(named)):
            raise InvalidArgument(
                f"chosen of group {number} is {named!r:.80}, expected ascending numbers below {count}"
            )
        assert part.group is not None
        if part.group.is_full and named and named[-1] - named[0] >= len(named):
            raise InvalidArgument(f"chosen of group {number}, a full one, is {named!r:.80}, expected numbers in a row")
        found.append(named)
    return tuple(found)


def _joined(results: Sequence[SaveResult]) -> SaveResult:
    """The result over the chunks of several saves."""
    reasons: dict[str, int] = {}
    for result in results:
        for reason, count in result.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return SaveResult(
        sum(result.stored for result in results),
        sum(result.present for result in results),
        sum(result.declined for result in results),
        tuple(state for result in results for state in result.states),
        reasons,
        sum(result.clipped for result in results),
        sum(result.part for result in results),
    )
