"""Durations of requests on the control thread, by verb, and failures.

The time runs from a request's dispatch to its answer; one that has to wait (for memory, for a check of bytes) includes its
wait. Control thread only; no clock is read here.

Invariant: `native` has a row for each verb and no other, so that a peer cannot make rows.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import kvpool_native
from kvpool.protocol.verbs import Verb

# Upper bounds of the buckets; a further bucket counts what took longer.
BOUNDS_NS = tuple(step * 10**power for power in range(3, 10) for step in (1, 2, 5))[2:-1]


@dataclass(frozen=True, slots=True)
class VerbTimes:
    """One verb's requests: `counts` by bucket, `sum_ns` of all, how many were `refused`, and how many `failed` inside."""

    counts: tuple[int, ...]
    sum_ns: int
    refused: int
    failed: int


class RequestTimes:
    """All verbs of one daemon, over all connections."""

    def __init__(self, verbs: Iterable[Verb]) -> None:
        self._records = [verb.record for verb in verbs]
        kinds = [record.KIND for record in self._records]
        self.native = kvpool_native.VerbTimes(kinds, BOUNDS_NS)
        self._refused = dict.fromkeys(kinds, 0)
        self._failed = dict.fromkeys(kinds, 0)

    def add_time(self, kind: int, taken_ns: int) -> None:
        """A request of this kind took this long. REQUIRES: the kind is a verb's."""
        self.native.add_time(kind, taken_ns)

    def add_refusal(self, kind: int) -> None:
        """A request was answered by a refusal."""
        self._refused[kind] += 1

    def add_failure(self, kind: int) -> None:
        """A request ended in an unexpected error; one that was not even decoded has no verb."""
        if kind in self._failed:
            self._failed[kind] += 1

    def verbs(self) -> dict[str, VerbTimes]:
        """The times added so far, by verb; a copy."""
        return {_verb_name(record): self._times_of(record.KIND) for record in self._records}

    def _times_of(self, kind: int) -> VerbTimes:
        counts, sum_ns = self.native.row(kind)
        return VerbTimes(tuple(counts), sum_ns, self._refused[kind], self._failed[kind])


def _verb_name(record: type[Any]) -> str:
    """`issue_ticket` for `IssueTicket`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()
