"""Every frame of the local protocol, byte for byte, in each supported version; and the page that documents them."""

import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import Refused
from kvpool.protocol import frames, versions
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.batch import BATCHED
from kvpool.protocol.records.one_way import UNANSWERED
from kvpool.protocol.verbs import OPERATOR
from kvpool.router_events import columns as event_columns
from kvpool.router_events.columns import pack_events
from kvpool.server.service import VERBS
from kvpool.types import Cause, Event, EventKind, RetainState, SaveState
from kvpool_client.results import RetainResult, SaveResult, save_state_of
from tests.golden import wire

PAGE = Path(__file__).parent.parent.parent / "docs" / "protocol.md"
NEW_FRAME = """
This record is new or has changed. docs/protocol.md, "What makes a new version", says whether older peers can live with it.
Then: its row in docs/protocol.md; `versions.SINCE` or `versions.FIELDS_UP_TO` where it came with a new version; and
`python -m tests.golden.wire`, which writes what this test reads.
"""


def _named(records: list[type[Any]]) -> dict[str, type[Any]]:
    return {record.__name__: record for record in records}


@pytest.mark.parametrize("version", range(versions.OLDEST, versions.NEWEST + 1))
def test_every_frame_is_written_as_its_version_has_it(version: int) -> None:
    known = wire.frames_of(version)
    spoken = [record for record in wire.records() if versions.SINCE.get(record, versions.OLDEST) <= version]
    assert sorted(known) == sorted(record.__name__ for record in spoken), NEW_FRAME
    for record in spoken:
        head, frame = known[record.__name__]
        count = versions.fields_of(record, version)
        expected_head = wire.head_of(record).split()
        assert head.split() == expected_head[: None if count is None else 2 + count], NEW_FRAME
        assert versions.encode_for(wire.example_of(record), wire.SEQUENCE, version) == frame, NEW_FRAME


@pytest.mark.parametrize("version", range(versions.OLDEST, versions.NEWEST + 1))
def test_every_frame_of_a_version_is_read(version: int) -> None:
    records = _named(wire.records())
    for name, (_, frame) in wire.frames_of(version).items():
        kind, sequence, values = frames.decode(frame[frames.LENGTH.size :])
        record = records[name]
        assert (kind, sequence) == (record.KIND, wire.SEQUENCE)
        if record in versions.FIELDS_UP_TO:
            read = versions.decode_of_any(record, values)
            assert list(m.values_of(read))[: len(values)] == values
        else:
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
        since = versions.SINCE.get(verb.record, versions.OLDEST)
        assert (f"from version {since} on" in note) == (since > versions.OLDEST), f"{name}: since version {since}"
        answers = re.findall(r"answered by (\w+)", note)
        if verb.record.KIND in UNANSWERED:
            assert "never answered" in note, f"{name} is never answered"
        else:
            assert answers, f"{name}: `answered by` which record"
            assert answers[0] in records
    batched = re.search(r"frames of the kinds ([\d, and]+),", notes["Batch"])
    assert batched is not None
    assert {int(kind) for kind in re.findall(r"\d+", batched[1])} == BATCHED


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (2, 2, 2),
        (1, 99, versions.NEWEST),
        (-5, 1, 1),
        (0, 0, 0),
        (versions.NEWEST + 1, 9, 0),
        (1, -1, 0),
        (2, 1, 0),
    ],
)
def test_the_newest_version_that_an_operator_and_the_daemon_speak_is_chosen(
    oldest: int, newest: int, chosen: int
) -> None:
    if chosen:
        assert versions.choose(oldest, newest, m.ROLE_ADMIN) == chosen
    else:
        with pytest.raises(Refused, match="version: client speaks protocol"):
            versions.choose(oldest, newest, m.ROLE_ADMIN)


def test_an_engine_that_cannot_read_the_index_gets_a_remedy() -> None:
    assert versions.choose(1, 3, m.ROLE_ENGINE) == 3
    assert versions.choose(3, 99, m.ROLE_ENGINE) == versions.NEWEST
    for newest in (1, 2):
        spoken = f"protocol 1 to {newest}, this daemon 3 to {versions.NEWEST}: update the client"
        with pytest.raises(Refused, match=spoken):
            versions.choose(1, newest, m.ROLE_ENGINE)
    with pytest.raises(Refused, match="update the daemon"):
        versions.choose(versions.NEWEST + 1, versions.NEWEST + 2, m.ROLE_ENGINE)


def test_states_that_a_client_does_not_know_are_declined_or_other() -> None:
    states = [save_state_of(code) for code in (SaveState.STORED, 17, 254)]
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
    frame = versions.encode_for(m.Failure("later", "why"), 3, versions.NEWEST)
    assert m.decode_as(m.Failure, frames.decode(frame[frames.LENGTH.size :])[2]).code == "later"
