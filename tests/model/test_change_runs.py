"""Runs of changes against a model that joins them one by one: random rows, over a directory that knows some token ids."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import kvpool_native
from kvpool.events import Cause, Event, EventKind
from kvpool.ids import KEY_BYTES
from kvpool.journal.event_log import EVENT_PAYLOAD_BYTES_MAX, Change, ChangeKind, event_of_run
from kvpool.keys import SCOPE_BYTES_MAX, pack_scope, split_scope
from kvpool.row_structs import struct_of
from kvpool.states import Level
from tests.rigs.events.journal_rig import LAYOUT, Rig, key, sums

ROW, _ = struct_of(kvpool_native.CHANGE_ROW, "key", "unused")
TOKEN_BYTES = 4 * LAYOUT.chunk_tokens
SCOPES = (b"", b"", pack_scope("", b"salt"), pack_scope("adapter", b""), pack_scope("adapter", b"salt"))
# Words that slots of another layout may have: no token ids of this one, nor these and a scope.
UNFIT = (bytes(TOKEN_BYTES - 4), bytes(TOKEN_BYTES + 4), bytes(TOKEN_BYTES + SCOPE_BYTES_MAX + 4))


class Published(NamedTuple):
    """A change as the model sees it."""

    row: Change
    kind: EventKind
    before: int
    tokens: bytes
    scope: tuple[str, bytes]


def joined(
    rows: list[Change], words: dict[bytes, bytes], payload_max: int
) -> Iterator[tuple[Published, list[Published]]]:
    """Events as the rules say: change by change, each joined to the last event or the first of another."""
    event: list[Published] = []
    for row in rows:
        arrived = row.kind == ChangeKind.ARRIVED
        tokens, scope = split_scope(words.get(row.key, b"") if arrived else b"", TOKEN_BYTES)
        bit = 1 << row.level
        before = row.tiers & ~bit if arrived else row.tiers | bit if row.kind == ChangeKind.LEFT else row.tiers
        kind = EventKind.STORED if not before else EventKind.UPDATED if row.tiers else EventKind.REMOVED
        published = Published(row, kind, before, tokens, scope)
        if event and not joins(event, published, payload_max):
            yield event[0], event
            event = []
        event.append(published)
    if event:
        yield event[0], event


def joins(event: list[Published], published: Published, payload_max: int) -> bool:
    first, last = event[0], event[-1]
    alike = (published.kind, published.before, published.scope, published.row.namespace) == (
        first.kind, first.before, first.scope, first.row.namespace
    )  # fmt: skip
    payload = sum(KEY_BYTES + len(other.tokens) for other in [*event, published])
    if not alike or published.row[6:] != first.row[6:] or published.kind == EventKind.UPDATED or payload > payload_max:
        return False
    follows = published.row.parent == last.row.key and len(published.tokens) == len(last.tokens)
    return published.kind == EventKind.REMOVED or follows


def event_of(number: int, first: Published, event: list[Published]) -> Event:
    row, has_parent = first.row, first.kind != EventKind.REMOVED and first.row.parent != bytes(KEY_BYTES)
    return Event(
        number, first.kind, row.namespace, b"".join(one.row.key for one in event), row.parent if has_parent else b"",
        b"".join(one.tokens for one in event), row.tiers, first.before, row.priority, row.priority_before,
        Cause(row.cause), (), *first.scope
    )  # fmt: skip


def stored_words(rig: Rig, chance: random.Random) -> dict[bytes, bytes]:
    """A chain of chunks in memory, each with token ids, a scope behind them, neither, or words that are no such thing."""
    names = [1] * chance.randrange(1, 20)
    column = b"".join(key(names[: at + 1]) for at in range(len(names)))
    made = rig.memory.reserve(rig.namespace.id, rig.namespace.size_class, b"", column, rig.tick())
    words: dict[bytes, bytes] = {}
    scope = chance.choice(SCOPES)
    for at in range(len(names)):
        scope = scope if chance.random() < 0.8 else chance.choice(SCOPES)
        usual = chance.randbytes(TOKEN_BYTES) + scope
        kept = usual if chance.random() < 0.8 else chance.choice((b"", *UNFIT))
        rig.memory.commit(made.id, at, sums(1), rig.tick(), kept)
        words[column[KEY_BYTES * at : KEY_BYTES * (at + 1)]] = kept
    return words


def random_rows(chance: random.Random, keys: list[bytes]) -> list[Change]:
    """Changes that mostly continue the last one."""
    rows: list[Change] = []
    for _ in range(chance.randrange(40)):
        at = chance.randrange(len(keys))
        parent = keys[at - 1] if at else bytes(KEY_BYTES)
        row = Change(
            keys[at], parent, chance.randrange(2), chance.choice((0, 3, 7, 2**32 - 1)), chance.randrange(3),
            chance.randrange(1, 3), chance.randrange(8),
            chance.choice([cause for cause in Cause if cause is not Cause.OTHER]), chance.choice((35, 80)), 35
        )  # fmt: skip
        while True:
            rows.append(row)
            at = (at + 1) % len(keys)
            if chance.random() < 0.2:
                break
            row = row._replace(key=keys[at], parent=rows[-1].key if chance.random() < 0.95 else bytes(KEY_BYTES))
    return rows


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_runs_equal_joining_change_by_change(seed: int) -> None:
    note(f"seed {seed}")
    chance, rig = random.Random(seed), Rig()
    words = stored_words(rig, chance)
    rows = random_rows(chance, [*words, *(key([2, name]) for name in range(5))])
    payload_max = chance.choice((200, 1000, EVENT_PAYLOAD_BYTES_MAX))
    packed = b"".join(ROW.pack(*row) for row in rows)
    rig.memory.set_chunk_tokens(rig.memory.add_namespace(), LAYOUT.chunk_tokens)
    runs = rig.memory.runs_of(packed, payload_max)
    expected = list(joined(rows, words, payload_max))
    assert [event_of_run(run, number) for number, run in enumerate(runs)] == [
        event_of(number, first, event) for number, (first, event) in enumerate(expected)
    ]
    assert [(run.change_kind, run.level) for run in runs] == [
        (first.row.kind, first.row.level) for first, _ in expected
    ]
    for run, (_, event) in zip(runs, expected, strict=True):
        kinds = {(published.row.kind, published.row.level) for published in event}
        assert (run.change_kind, run.level) in kinds


def test_invalid_rows_and_unknown_namespaces_are_refused() -> None:
    rig = Rig()
    row = ROW.pack(key([1]), bytes(32), 3, 0, ChangeKind.ARRIVED, Level.DRAM, 1 << Level.DRAM, Cause.STORED, 35, 35)
    assert rig.memory.runs_of(b"", 1000) == []
    with pytest.raises(ValueError, match="multiple of 80"):
        rig.memory.runs_of(row[:-1], 1000)
    with pytest.raises(KeyError):
        rig.memory.runs_of(row, 1000)
    with pytest.raises(IndexError):
        rig.memory.set_chunk_tokens(3, 8)
