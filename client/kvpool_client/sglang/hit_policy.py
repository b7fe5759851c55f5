"""Hit policies: the prefixes that SGLang can go on from, as each of its host pools has the pages it needs of them.

    all_pages        every page of the prefix                    KV, indexers, draft models of full attention
    trailing_pages   the last ones, as many as are asked for     sliding windows, states of Mamba
    block_groups     a second form of the KV: never a condition  no pool of 0.5.23 asks for it

A pool with a window has gaps: a prefix of 5 pages may be there while those of 4 and 3 are not. So what comes out is the set of
all prefixes, which SGLang intersects over its ranks. Pure functions; any thread.
"""

from collections.abc import Sequence

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


def prefixes_of(policy: str, present: Sequence[bool], trailing: int) -> list[int]:
    """The lengths of the prefixes, in pages and ascending, that a pool can serve which has these pages. None for a policy that
    is not known."""
    if policy == ALL_PAGES:
        run = next((number for number, is_there in enumerate(present) if not is_there), len(present))
        return list(range(1, run + 1))
    if policy != TRAILING_PAGES:
        return []
    lengths, run = [], 0
    for length, is_there in enumerate(present, 1):
        run = run + 1 if is_there else 0
        if run >= min(length, max(1, trailing)):
            lengths.append(length)
    return lengths
