"""Reserve runs: what a request for slots names, run by run, and its column: u32 little endian [run][7].

    group, form, chunks, first layer, layers, first head group, head groups      all four 0: the whole of each chunk is written

The keys of a run that is behind a parent begin with the parent's, which is none of its chunks. Pure functions; any thread.
"""

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvpool.errors import ProtocolError
from kvpool.key_column import keys_in
from kvpool.layouts.groups import GROUPS_MAX
from kvpool.layouts.share import Share
from kvpool.protocol.records import messages as m

RUNS_MAX = GROUPS_MAX  # one of each group: who writes behind a chunk holds thousands that precede it
_ROW = struct.Struct("<7I")


class RunForm(enum.IntEnum):
    """How the chunks of a run follow each other."""

    ALONE = 0  # each chunk by itself, without a parent
    ROOT = 1  # a chain from the beginning of a prompt
    BEHIND = 2  # a chain behind a parent


_FORMS = tuple(RunForm)


class ReserveRun(NamedTuple):
    """Chunks of one group. `share`: of the part of each chunk that is written; None: all of it."""

    group: int
    form: RunForm
    chunks: int
    share: Share | None = None


def pack_runs(runs: Sequence[ReserveRun]) -> bytes:
    """The column of runs."""
    return b"".join(
        _ROW.pack(run.group, run.form, run.chunks, share.first_layer, share.layers, share.first_group, share.groups)
        if (share := run.share) is not None
        else _ROW.pack(run.group, run.form, run.chunks, 0, 0, 0, 0)
        for run in runs
    )


def unpack_runs(column: bytes) -> list[ReserveRun]:
    """The runs in a column. Raises ProtocolError for one that is none, names a run of no chunks, or two of one group."""
    if len(column) % _ROW.size or not 0 < len(column) <= RUNS_MAX * _ROW.size:
        raise ProtocolError(f"runs column has {len(column)} bytes, expected {_ROW.size} each for 1..{RUNS_MAX} runs")
    runs: list[ReserveRun] = []
    for group, form, chunks, *share in _ROW.iter_unpack(column):
        if form >= len(_FORMS) or not chunks:
            raise ProtocolError(f"run {len(runs)} has form {form} and {chunks} chunks, expected 0..2 and 1 or more")
        runs.append(ReserveRun(group, _FORMS[form], chunks, Share(*share) if any(share) else None))
    if len(runs) > 1 and len({run.group for run in runs}) < len(runs):
        raise ProtocolError(f"{len(runs)} runs name a group twice, expected one run of each at most")
    return runs


def reserve_chain(
    parent: bytes,
    keys: bytes,
    priorities: bytes = b"",
    durations: bytes = b"",
    *,
    group: int = 0,
    share: Share | None = None,
) -> m.Reserve:
    """The request for one chain behind `parent`; empty: from the beginning."""
    form = RunForm.BEHIND if parent else RunForm.ROOT
    run = ReserveRun(group, form, keys_in(keys), share)
    return m.Reserve(pack_runs([run]), parent + keys, priorities, durations)
