"""Requests as the tier knows them: hints, read once when vLLM shows a request, and what was stored and could not be loaded.

vLLM keeps a state in a request's context for each tier. Its hints are those of `kv_hints` beside the request, else of
`kv_transfer_params`; a mistake costs the hint, never the request. Threads: the scheduler's, but for `failed`, to which the
thread of loads adds before it reports the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.states import TokenRange
from kvpool_client.hint_envelope import PIN, RETAIN, Outcome, hints_of_transfer_params

_NOT_SERVED = "vLLM shows a tier no keys before they are stored, and not where the output begins"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. `epoch`: of the weights that its KV is of, None: of several. `ranges`: the retention of its tokens, of which
    the first that touches a chunk decides. `failed`: keys that could not be loaded, and are a miss from then on. `stored`: keys
    that were offered, by their last token; `jobs`: in how many jobs."""

    epoch: bytes | None
    ranges: tuple[TokenRange, ...] = ()
    may_load: bool = True
    may_save: bool = True
    rejected: tuple[str, ...] = ()
    failed: set[bytes] = field(default_factory=set)
    stored: dict[bytes, int] = field(default_factory=dict)
    jobs: int = 0

    def retention_of(self, end: int, tokens: int, priority: int | None) -> TokenRange | None:
        """The retention of the chunk of so many tokens that ends there; `priority`: where no hint covers it."""
        first = max(0, end - tokens)
        for entry in self.ranges:
            if entry.start < end and (entry.end is None or entry.end > first):
                return entry
        return None if priority is None else TokenRange(0, None, priority)


def state_of(context: Any, epoch: bytes | None) -> RequestState:
    """The state of a request that has arrived."""
    params, given = getattr(context, "kv_transfer_params", None), getattr(context, "kv_hints", None)
    if not params and given is None:
        return RequestState(epoch)
    beside = params if isinstance(params, Mapping) else {}
    hints, ranges, output = hints_of_transfer_params(beside, given)
    rejected = [f"{entry.action_type}: {entry.reason}" for entry in hints.actions if isinstance(entry, Outcome)]
    unserved = {
        entry.action_type
        for entry in hints.actions
        if not isinstance(entry, Outcome) and entry.verb not in (RETAIN, PIN)
    }
    unserved |= {"retention of the output"} if output is not None else set()
    rejected += [f"{name}: {_NOT_SERVED}" for name in sorted(unserved)]
    return RequestState(
        epoch,
        ranges,
        may_load=beside.get("load") is not False,
        may_save=beside.get("save") is not False,
        rejected=tuple(rejected),
    )


def in_prompt_order(keys: Sequence[bytes], ends: Sequence[int]) -> list[int]:
    """The places of keys in the order of their last tokens."""
    return sorted(range(len(keys)), key=ends.__getitem__)
