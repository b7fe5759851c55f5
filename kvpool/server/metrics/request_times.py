"""Durations of requests on the control thread, by verb, and failures.

The time runs from a request's dispatch to its answer; one that has to wait (for memory, for a check of bytes) includes its
wait. Adding is a search among 18 bounds and two additions, 0.2 µs (measured); it never makes a row.
Control thread only; no clock is read here.

Invariant: `_counts` has a row for each verb and no other, so that a peer cannot make rows.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import connections as cm
from kvpool.protocol.records import events as em
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.records import operator as om
from kvpool.protocol.records import staging as sm

# Upper bounds of the buckets; a further bucket counts what took longer.
BOUNDS_NS = tuple(step * 10**power for power in range(3, 10) for step in (1, 2, 5))[2:-1]
VERBS: tuple[type[Any], ...] = (
    *(m.Acquire, m.AcquireLeaves, m.Release, one_way.DropLease, one_way.DropLeases, m.Renew, m.IssueTicket, m.Claim),
    *(m.Reserve, sm.OpenStaging, sm.CopyStaged, m.Commit, m.End, one_way.DropReservation, m.ReportCorrupt, m.Usage),
    bm.Batch,
    *(em.AskEvents, em.AskSnapshot, em.AskChunkHistory, em.AskNamespaces, m.Retain, m.Announce, m.Demote),
    *(m.AskInfo, m.AskStats, m.Flush, m.DemoteAll, m.Check, m.VerifyBytes, m.AskHitCurve, m.AskLayouts, m.RetainKeys),
    *(cm.AskConnections, cm.Disconnect),
    *(om.LogLevel, om.Reload),
)


@dataclass(frozen=True, slots=True)
class VerbTimes:
    """One verb's requests: `counts` by bucket, `sum_ns` of all, how many were `refused`, and how many `failed` inside."""

    counts: tuple[int, ...]
    sum_ns: int
    refused: int
    failed: int


class RequestTimes:
    """All verbs of one daemon, over all connections."""

    def __init__(self) -> None:
        self._counts = {verb.KIND: [0] * (len(BOUNDS_NS) + 1) for verb in VERBS}
        self._sums_ns = dict.fromkeys(self._counts, 0)
        self._refused = dict.fromkeys(self._counts, 0)
        self._failed = dict.fromkeys(self._counts, 0)

    def add(self, kind: int, taken_ns: int) -> None:
        """A request of this kind took this long. REQUIRES: the kind is a verb's."""
        self._counts[kind][bisect_left(BOUNDS_NS, taken_ns)] += 1
        self._sums_ns[kind] += taken_ns

    def add_refusal(self, kind: int) -> None:
        """A request was answered by a refusal."""
        self._refused[kind] += 1

    def add_failure(self, kind: int) -> None:
        """A request ended in an error that nobody expected; one that was not even read has no verb."""
        if kind in self._failed:
            self._failed[kind] += 1

    def verbs(self) -> dict[str, VerbTimes]:
        """What has been added, by verb; a copy."""
        return {
            verb_name(verb): VerbTimes(
                tuple(self._counts[verb.KIND]),
                self._sums_ns[verb.KIND],
                self._refused[verb.KIND],
                self._failed[verb.KIND],
            )
            for verb in VERBS
        }


def verb_name(record: type[Any]) -> str:
    """`issue_ticket` for `IssueTicket`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()
