"""Choice: from which of several nodes the next chunks of a prompt are pulled. Pure; any thread.

What counts is the time until the last chunk that any of them has is here: a node with a part of them may be so much faster that
the rest is taken from another one afterwards.
"""

from collections.abc import Callable, Sequence

from kvpool.index.remote_chunks import NodeName, RemoteRun


def choose_run(runs: Sequence[RemoteRun], cost_s: Callable[[NodeName, int], float]) -> RemoteRun | None:
    """The run to take first, of runs that begin with the same chunk. `cost_s`: how long so many chunks of a node take."""
    ways: list[tuple[float, RemoteRun]] = []  # from each run's end on, the longest first: how long the rest takes
    for run in sorted(runs, key=lambda one: -one.chunks):
        longer = [(rest_s, other) for rest_s, other in ways if other.chunks > run.chunks]
        rest_s = min(
            (cost_s(other.node, other.chunks - run.chunks) + after_s for after_s, other in longer),
            default=0.0,
        )
        ways.append((rest_s, run))
    best = min(ways, key=lambda way: way[0] + cost_s(way[1].node, way[1].chunks), default=None)
    return None if best is None else best[1]
