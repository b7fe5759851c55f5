"""Every frame of the local protocol, byte for byte; and the page that documents them."""

import re
from pathlib import Path
from typing import Any

from kvpool.events import Cause, Event, EventKind
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.batch import BATCHED
from kvpool.protocol.records.one_way import UNANSWERED
from kvpool.protocol.verbs import OPERATOR
from kvpool.router_events import columns as event_columns
from kvpool.router_events.columns import pack_events
from kvpool.server.service import VERBS
from kvpool.states import RetainState, SaveState
from kvpool_client.verbs.results import SAVE_STATES, RetainResult, SaveResult
from tests.golden import wire

PAGE = Path(__file__).parent.parent.parent / "docs" / "protocol.md"
NEW_FRAME = """
This record is new or has changed. docs/protocol.md, "Changes that need a new version", says whether older peers can read it.
Then: its row in docs/protocol.md; `versions.SINCE` or `versions.FIELDS_UP_TO` where it came with a new version; and
`python -m tests.golden.wire`, which writes what this test reads.
"""


def _named(records: list[type[Any]]) -> dict[str, type[Any]]:
    return {record.__name__: record for record in records}


def test_every_frame_has_its_golden_bytes() -> None:
    known = wire.golden_frames()
    assert sorted(known) == sorted(record.__name__ for record in wire.records()), NEW_FRAME
    for record in wire.records():
        head, frame = known[record.__name__]
        assert (head, m.encode(wire.example_of(record), wire.SEQUENCE)) == (wire.head_of(record), frame), NEW_FRAME
        kind, sequence, values = frames.decode(frame[frames.LENGTH.size :])
        assert (kind, sequence) == (record.KIND, wire.SEQUENCE)
        assert m.decode_as(record, values) == wire.example_of(record)


def test_the_page_has_a_row_for_every_frame() -> None:
    page = PAGE.read_text()
    for record in wire.records():
        kind, name, *fields = wire.head_of(record).split()
        row = f"| {kind} | {name} | {' '.join(f'`{field}`' for field in fields)} |"
        assert row in page, f"docs/protocol.md lacks the row {row}\n{NEW_FRAME}"


def test_every_request_is_measured_by_its_name() -> None:
    assert {verb.record.__name__ for verb in VERBS} <= {record.__name__ for record in wire.records()}


def _notes() -> dict[str, str]:
    """The page's text after each record's fields, by the record's name."""
    rows = (line.split(" | ") for line in PAGE.read_text().split("## Records")[1].splitlines() if line.startswith("| "))
    return {row[1].strip(): row[-1].strip(" |") for row in rows if len(row) > 3}


def test_the_page_lists_sender_and_answer_of_each_verb() -> None:
    notes, records = _notes(), _named(wire.records())
    assert set(notes) - {"record"} == set(records)
    for verb in VERBS:
        name, note = verb.record.__name__, notes[verb.record.__name__]
        assert note.startswith("admin") == (verb.roles == OPERATOR), (
            f"{name}: `admin` stands first where only those may"
        )
        answers = re.findall(r"answered by (\w+)", note)
        if verb.record.KIND in UNANSWERED:
            assert "never answered" in note, f"{name} is never answered"
        else:
            assert answers, f"{name}: `answered by` which record"
            assert answers[0] in records
    batched = re.search(r"frames of the kinds ([\d, and]+),", notes["Batch"])
    assert batched is not None
    assert {int(kind) for kind in re.findall(r"\d+", batched[1])} == BATCHED


def test_states_that_a_client_does_not_know_are_declined_or_other() -> None:
    states = [SAVE_STATES[code] for code in (SaveState.STORED, 17, 254)]
    result = SaveResult.of(states)
    assert (result.stored, result.declined, dict(result.reasons)) == (1, 2, {"other": 2})
    kept = RetainResult.of(3, [0, 2], bytes([RetainState.ACCEPTED, 77]))
    assert (kept.accepted, kept.clipped, kept.absent, kept.states) == (1, 0, 1, ("accepted", "", "absent"))
    later = Event(8, 9, keys=b"k" * 32)  # type: ignore[arg-type]
    odd = Event(7, EventKind.REMOVED, keys=b"k" * 32, cause=99)  # type: ignore[arg-type]
    assert [(event.id, event.cause) for event in event_columns.unpack_events(pack_events([odd, later]))] == [
        (7, Cause.OTHER)
    ]


def test_a_failure_with_a_code_of_a_later_version_is_a_refusal() -> None:
    frame = m.encode(m.Failure("later", "why"), 3)
    assert m.decode_as(m.Failure, frames.decode(frame[frames.LENGTH.size :])[2]).code == "later"
