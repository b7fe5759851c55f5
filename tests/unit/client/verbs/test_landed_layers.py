"""Tests of what a save reports of its layers before the commit: all of them, in order, in records of a bounded size."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.states import SaveState
from kvpool_client.verbs.save import ReservedSave, Save, SavedRun

LAYERS = 40


class Run:
    """A copy whose layers are there as the test has it."""

    def __init__(self, chunks: int) -> None:
        self.sums = np.arange(chunks * LAYERS, dtype="<u4").reshape(chunks, LAYERS)
        self.copied = 0

    def announce(self, _layer: int) -> bool:
        return True

    def copied_extents(self) -> int:
        return self.copied

    def checksums_from(self, layer: int) -> bytes:
        return self.sums[:, layer : self.copied].tobytes()


class Session:
    """Takes what is sent, as long as `is_there`."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(remote_bytes=1)
        self.sent: list[one_way.LandSaved] = []
        self.is_there = True
        self.is_alive = False  # nobody ends what these tests leave

    def notify(self, record: one_way.LandSaved) -> bool:
        if self.is_there:
            self.sent.append(record)
        return self.is_there


def save_of(session: Session, run: Run, extents: int = LAYERS) -> Save:
    """A save of reserved chunks under way."""
    states = bytearray([SaveState.RESERVED] * len(run.sums))
    saved = SavedRun(0, states, b"", layers=LAYERS, head_groups=1, extents=extents, is_part=False, run=cast(Any, run))
    reserved = ReservedSave(
        cast(Any, session),
        7,
        (saved,),
        scope=b"",
        pending=cast(Any, None),
        end_token=16 * len(run.sums),
        has_groups=False,
        timeout_s=1.0,
        on_end=lambda _: None,
    )
    return Save(reserved)


@pytest.mark.parametrize("chunks", [1, 700, 16_384])
@pytest.mark.parametrize("at_once", [1, 7, LAYERS])
def test_every_layer_is_reported_once_and_in_order(chunks: int, at_once: int) -> None:
    session, run = Session(), Run(chunks)
    save = save_of(session, run)
    for layer in range(LAYERS):
        run.copied = (layer + 1) // at_once * at_once
        save.layer(layer)
    landed = 0
    for record in session.sent:
        assert len(record.checksums) <= m.COMMIT_BYTES_MAX
        assert record.first_extent == landed
        sums = np.frombuffer(record.checksums, "<u4").reshape(chunks, -1)
        assert np.array_equal(sums, run.sums[:, landed : landed + sums.shape[1]])
        landed += sums.shape[1]
    assert landed >= LAYERS // at_once * at_once - 1, "all but the last layer, which comes with the commit"


def test_layers_that_could_not_be_sent_are_not_passed_over() -> None:
    session, run = Session(), Run(3)
    save = save_of(session, run)
    session.is_there = False
    run.copied = 2
    save.layer(0)
    session.is_there = True
    run.copied = 4
    save.layer(1)
    assert [(record.first_extent, len(record.checksums)) for record in session.sent] == [(0, 4 * 4 * 3)]


def test_summaries_are_not_reported_before_the_commit() -> None:
    session, run = Session(), Run(3)
    save = save_of(session, run, LAYERS + 1)
    run.copied = LAYERS - 1
    save.layer(0)
    run.copied = LAYERS
    save.layer(1)
    assert [(record.first_extent, len(record.checksums)) for record in session.sent] == [(0, 4 * (LAYERS - 1) * 3)]
