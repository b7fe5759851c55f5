"""Level 0: what engines report of their own block pools, joined with the tiers. A subscriber has the sum at every step."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.events import Cause, EventKind
from kvpool.ids import ConnectionId, NamespaceId
from kvpool.journal.engine_chunks import CHUNK_BYTES, EngineChunk, EngineChunks, Source
from kvpool.key_column import KeyColumn
from kvpool.keys import split_scope
from kvpool.router_events.vllm_format import EventForm
from kvpool.states import DEFAULT_PRIORITY, ReportState
from tests.rigs.events.engine_chunks import AGAIN, ONE, OTHER, Reported, chunks_of, drops, has
from tests.rigs.events.journal_rig import DRAM, HBM, LAYOUT, SSD, Rig, changes, follow, key, take_snapshot, words_of
from tests.rigs.events.readers import Replica
from tests.rigs.flushing import flush_whole

TAKEN, FULL, NO_PARENT, FOREIGN = ReportState


def test_a_save_an_eviction_and_the_end_of_a_chunk_that_an_engine_has() -> None:
    rig = Rig()
    has(rig, [1])
    rig.store([1])
    rig.demote_all()
    flush_whole(rig.memory, rig.tick())
    flush_whole(rig.files, rig.tick())
    drops(rig, [[1]])
    updated = EventKind.UPDATED
    assert changes(rig) == [
        (EventKind.STORED, 1, 0, HBM),
        (updated, 1, HBM, HBM | DRAM),
        (updated, 1, HBM | DRAM, HBM | DRAM | SSD),
        (updated, 1, HBM | DRAM | SSD, HBM | SSD),
        (updated, 1, HBM | SSD, HBM),
        (EventKind.REMOVED, 1, HBM, 0),
    ]
    last = rig.journal.since(b"", rig.journal.newest - 1).events[0]
    assert last.cause == Cause.DISCARDED
    assert EventForm().events_of(last, "m", LAYOUT)[0]["medium"] == "GPU"  # type: ignore[call-overload]


def test_two_engines_with_one_chunk_remove_it_when_the_second_drops_it() -> None:
    rig = Rig()
    for source in (ONE, OTHER, AGAIN):
        assert has(rig, [1, 2], source) == [TAKEN] * 2
    drops(rig, [[1, 2], [1]], OTHER)
    rig.journal.end_source(AGAIN)
    assert changes(rig) == [(EventKind.STORED, 2, 0, HBM)]
    drops(rig, [[1, 2], [1]])
    assert changes(rig)[1:] == [(EventKind.REMOVED, 2, HBM, 0)]
    assert rig.journal.verify() == []


def test_an_ended_connection_takes_its_chunks_with_it_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", 2)
    rig, replica = Rig(), Replica()
    for source in (ONE, AGAIN, OTHER):
        has(rig, [1, 2, 3] if source is OTHER else [1, 2, 3, 4, source.number], source)
    rig.journal.end_reports(ONE.connection)
    assert rig.journal.stats()["events.engine_chunks"] > 3, "it ends in parts"
    for _ in range(10):
        rig.journal.take_changes()
    follow(rig, replica)
    assert replica.tiers() == {chunk.key: HBM for chunk in chunks_of([1, 2, 3])}
    rig.journal.end_reports(OTHER.connection)
    rig.journal.end_reports(OTHER.connection)
    for _ in range(10):
        rig.journal.take_changes()
    follow(rig, replica)
    assert replica.chunks == {}
    stats = rig.journal.stats()
    assert (stats["events.engine_chunks"], stats["events.engine_chunk_record_bytes"]) == (0, 0)
    assert rig.journal.verify() == []


def test_a_source_that_begins_anew_while_its_old_chunks_end_loses_none_of_the_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", 1)
    rig, replica = Rig(), Replica()
    has(rig, [1, 2, 3])
    rig.journal.end_source(ONE)
    assert has(rig, [1, 2]) == [TAKEN] * 2
    for _ in range(5):
        rig.journal.take_changes()
    follow(rig, replica)
    assert replica.tiers() == {chunk.key: HBM for chunk in chunks_of([1, 2])}
    assert rig.journal.verify() == []


def test_a_chunk_without_its_parent_is_declined_though_another_source_has_it() -> None:
    rig = Rig()
    has(rig, [1, 2], OTHER)
    report = Reported(KeyColumn(b""), chunks_of([1, 2])[1:])
    assert list(rig.journal.take_report(ONE, rig.namespace.id, report)) == [NO_PARENT]
    assert rig.journal.stats()["events.declined_engine_chunks"] == 1


def test_a_key_of_another_namespace_is_declined_and_void_where_its_bytes_come() -> None:
    rig, replica = Rig(), Replica()
    second = rig.namespaces.open("another", LAYOUT)
    rig.store([1])
    rig.journal.take_changes()
    report = Reported(KeyColumn(b""), chunks_of([1]))
    assert list(rig.journal.take_report(ONE, second.id, report)) == [FOREIGN]
    report = Reported(KeyColumn(b""), chunks_of([2]))
    assert list(rig.journal.take_report(ONE, second.id, report)) == [TAKEN]
    assert has(rig, [2], OTHER) == [FOREIGN]
    rig.store([2])
    follow(rig, replica)
    assert replica.tiers() == {key([1]): DRAM, key([2]): DRAM}
    assert replica.chunks[key([2])].namespace == rig.namespace.id
    rig.journal.end_reports(ONE.connection)
    follow(rig, replica)
    assert replica.tiers() == {key([1]): DRAM, key([2]): DRAM}
    assert has(rig, [2], OTHER) == [TAKEN]
    assert rig.journal.verify() == []


def test_a_gap_and_reused_numbers_leave_a_snapshot_with_what_engines_have() -> None:
    rig, replica = Rig(), Replica()
    has(rig, [1, 2])
    rig.store([3])
    rig.journal.forget_namespaces()
    assert rig.journal.since(rig.epoch, 1).is_gap
    assert take_snapshot(rig, replica)
    assert replica.tiers() == {key([1]): HBM, key([1, 2]): HBM, key([3]): DRAM}


def many(first: int, count: int) -> Iterator[EngineChunk]:
    """Chunks that begin prompts of their own."""
    return (chunks_of([name])[0] for name in range(first, first + count))


def test_a_connection_has_half_of_what_others_leave_and_a_user_its_share() -> None:
    size = CHUNK_BYTES + 32 + len("adapter")
    kept = EngineChunks(0.6, bytes_max=100 * size)
    mine = [Source(ConnectionId(number), 0, 1000) for number in range(1, 4)]
    others = Source(ConnectionId(9), 0, 1001)
    for source in mine:
        for chunk in many(1000 * source.connection, 100):
            if kept.has_room(source, chunk):
                kept.add_chunk(source, NamespaceId(0), chunk)
    assert 59 * size < kept.used_bytes <= 60 * size, "all connections of one user"
    assert not any(kept.has_room(source, chunk) for source in mine for chunk in many(9000, 2))
    assert all(kept.has_room(others, chunk) for chunk in many(9000, 2))
    assert kept.verify() == []
    kept.end_connection(mine[0].connection)
    kept.drop_ending()
    assert kept.has_room(mine[1], next(many(5000, 1)))
    assert kept.verify() == []


def test_a_report_beyond_the_bound_is_declined_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.journal.engine_chunks.CONNECTION_SHARE", 3.5 * CHUNK_BYTES / (128 << 20))
    rig, replica = Rig(), Replica()
    assert has(rig, [1, 2, 3, 4, 5]) == [TAKEN, TAKEN, TAKEN, FULL, NO_PARENT]
    follow(rig, replica)
    assert len(replica.chunks) == 3
    drops(rig, [[1, 2, 3]])
    assert has(rig, [1, 2, 4]) == [TAKEN] * 3
    assert rig.journal.verify() == []


class Engines:
    """Engines that report at random beside the tiers' own random operations, and what there must be."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig = rig
        self.chance = chance
        self.chains: dict[Source, dict[bytes, list[int]]] = {}

    def step(self) -> None:
        """A report, the end of a connection, or something that happens in the tiers."""
        dice = self.chance.randrange(10)
        source = Source(ConnectionId(self.chance.randrange(2)), self.chance.randrange(2))
        own = self.chains.setdefault(source, {})
        if dice < 3:
            names = [self.chance.randrange(3), *(self.chance.randrange(2) for _ in range(self.chance.randrange(4)))]
            assert set(has(self.rig, names, source)) == {TAKEN}
            own.update((key(names[: at + 1]), names[: at + 1]) for at in range(len(names)))
        elif dice < 5 and own:
            leaves = [names for names in own.values() if not any(other[:-1] == names for other in own.values())]
            leaf = self.chance.choice(leaves)
            drops(self.rig, [leaf], source)
            del own[key(leaf)]
        elif dice == 5:
            self.rig.journal.end_reports(source.connection)
            for number in (0, 1):
                self.chains.pop(source._replace(number=number), None)
        else:
            self.rig.random_step(self.chance)

    def settle(self) -> None:
        """Until nothing waits."""
        while self.rig.journal.is_behind or self.rig.journal._engines.chunks.is_ending:
            self.rig.journal.take_changes()

    def assert_converged(self, replica: Replica) -> None:
        """Tiers, parent, tokens and scope of every chunk that a tier or an engine has, and no other chunk."""
        truth = self.rig.truth()
        for own in self.chains.values():
            truth.update({stored: truth.get(stored, 0) | HBM for stored in own})
        assert replica.tiers() == truth
        names = {stored: names for own in self.chains.values() for stored, names in own.items()}
        for stored, known in replica.chunks.items():
            words = words_of(names[stored]) if stored in names else self.rig.headers.words[stored]
            tokens, scope = split_scope(words, 32)
            assert (known.tokens, known.adapter, known.salt_tag) == (tokens, *scope)
            in_tiers = truth[stored] & ~HBM
            assert known.priority == (self.rig.priority(stored) if in_tiers else DEFAULT_PRIORITY)
            assert not known.parent or known.parent in replica.chunks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_subscriber_has_what_tiers_and_engines_have_after_every_step(seed: int) -> None:
    rig, chance, replica = Rig(has_device=seed % 2 == 0), random.Random(seed), Replica()
    engines = Engines(rig, chance)
    for _ in range(50):
        engines.step()
        engines.settle()
        follow(rig, replica)
        engines.assert_converged(replica)
        assert rig.journal.verify() == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_snapshot_while_engines_and_tiers_go_on_leads_to_what_there_is(seed: int) -> None:
    rig, chance, replica = Rig(), random.Random(seed), Replica()
    engines = Engines(rig, chance)
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.journal.journal.PAGE_CHUNKS_MAX", chance.randrange(1, 5))
        patch.setattr("kvpool.journal.journal.CHANGES_PER_TURN", chance.choice((1, 3, 256)))
        for _ in range(30):
            engines.step()
        assert take_snapshot(rig, replica, between=engines.step)
    engines.settle()
    follow(rig, replica)
    engines.assert_converged(replica)
