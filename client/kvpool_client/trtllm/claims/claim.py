"""Claim: staged chunks of one prompt, which the engine may hand back in part.

    chunk          first ─────────────── end
    full group     ■   ■   ■   ■   ■   ■
    window                     ■   ■   ■      those with which the prompt goes on at the end, and not before it

Pure values; any thread.
"""

from dataclasses import dataclass, replace

from kvpool_client.trtllm.geometry import Geometry
from kvpool_client.trtllm.plan import NO_BLOCK, ByGroup


class BrokenClaim(RuntimeError):
    """A part of a claim that cannot be served alone, in a call that cannot refuse it: the engine would take KV that was never
    stored for loaded. It ends the call."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Chunks `first_chunk` up to `end`. `slots`: by layer group, of the last of these chunks, as many as the group needs."""

    first_chunk: int
    end: int
    slots: ByGroup

    @property
    def chunks(self) -> int:
        """How many chunks are claimed."""
        return self.end - self.first_chunk

    def start(self, group: int) -> int:
        """The first chunk of a group that has a slot."""
        return self.end - len(self.slots[group])

    def split(self, chunk: int) -> "tuple[Claim, Claim]":
        """The claims of the chunks before this one, and from it on."""
        assert self.first_chunk <= chunk <= self.end
        counts = [max(0, chunk - self.start(group)) for group in range(len(self.slots))]
        before = tuple(slots[:count] for slots, count in zip(self.slots, counts, strict=True))
        after = tuple(slots[count:] for slots, count in zip(self.slots, counts, strict=True))
        return replace(self, end=chunk, slots=before), replace(self, first_chunk=chunk, slots=after)

    def can_end_at(self, tokens: int, geometry: Geometry) -> bool:
        """Whether a prompt can go on behind so many of the claimed tokens: every group has what its next token attends to."""
        return all(
            max(self.first_chunk, group.oldest_block(tokens)) >= self.start(number)
            for number, group in enumerate(geometry.groups)
        )

    def blocks(self, tables: ByGroup) -> ByGroup:
        """The engine's block of each slot's chunk. Raises BrokenClaim where it has blocks for which nothing was staged: it
        attends to tokens that the prompt does not need behind the claim's end."""
        found = []
        for group, slots in enumerate(self.slots):
            table, start = tables[group], self.start(group)
            unserved = [block for block in table[self.first_chunk : start] if block != NO_BLOCK]
            if unserved:
                raise BrokenClaim(
                    f"{len(unserved)} blocks of layer group {group} before chunk {start}, expected none: the promise of chunks "
                    f"{self.first_chunk} to {self.end} has only the last {len(slots)} of this group"
                )
            found.append(tuple(table[start : self.end]))
        return tuple(found)

    def is_untaken(self, tables: ByGroup, geometry: Geometry) -> bool:
        """Whether the engine has all blocks that a prompt needs which is computed up to the claim's start: it takes nothing of
        the claim, and computes all of it."""
        starts = [group.oldest_block(self.first_chunk * group.tokens_per_block) for group in geometry.groups]
        return all(NO_BLOCK not in table[start : self.end] for table, start in zip(tables, starts, strict=True))


NO_CLAIM = Claim(0, 0, ())
