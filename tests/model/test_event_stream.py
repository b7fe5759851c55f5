"""A subscriber that adds up snapshot and events has exactly what the pool has, at every point, wherever it begins.

Random operations over real directories, half of the times with copies in a device: saves, copies, demotions, promotions,
changes of priority and their expiry, flushes, drops of bad chunks, evictions; gaps because a buffer or the feed was too small;
daemons that begin anew over a warm disk; snapshots between whose pages all of that goes on. Compared chunk by chunk: tiers,
priority, parent, namespace, token ids, adapter, salt.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.keys import split_scope
from tests.rigs.events.journal_rig import Rig, follow, take_snapshot, tokens_of
from tests.rigs.events.readers import Replica


def assert_everything_is_known(rig: Rig, replica: Replica) -> None:
    """Tiers, priority, parent, namespace, token ids and scope of every chunk that is stored, and no other chunk."""
    assert replica.tiers() == rig.truth()
    for stored, known in replica.chunks.items():
        tokens, scope = split_scope(rig.headers.words[stored], 32)
        assert (known.tokens, known.adapter, known.salt_tag) == (tokens, *scope)
        assert known.priority == rig.priority(stored)
        assert known.namespace == rig.namespace.id
        assert not known.parent or known.parent in replica.chunks


def catch_up(rig: Rig, replica: Replica, incarnation: bytes, chance: random.Random) -> bytes:
    """As a subscriber does: events behind its mark, or behind a gap a snapshot, while the pool goes on. The incarnation."""
    while True:
        found = rig.journal.since(incarnation, replica.last)
        if found.is_gap:
            if not take_snapshot(rig, replica, between=lambda: rig.random_step(chance)):
                assert take_snapshot(rig, replica)
            incarnation = rig.epoch
        elif not found.events:
            return incarnation
        else:
            replica.apply(found.events)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_subscriber_is_right_over_gaps_restarts_and_random_operations(seed: int) -> None:
    """A small buffer and feed, so that there are gaps; daemons that restart over a warm disk; pages of a few chunks."""
    chance, replica = random.Random(seed), Replica()
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("kvpool.journal.journal.PAGE_CHUNKS_MAX", chance.randrange(1, 9))
        patch.setattr("kvpool.journal.journal.FEED_CHANGES_MAX", chance.choice((8, 65_536)))
        rig = Rig(buffer="64KiB", has_device=chance.random() < 0.5)
        rig.journal._log._bytes_max = chance.choice((2000, 65_536))
        incarnation = rig.epoch
        for _ in range(8):
            for _ in range(chance.randrange(1, 12)):
                rig.random_step(chance)
                if chance.random() < 0.3:
                    incarnation = catch_up(rig, replica, incarnation, chance)
                    assert_everything_is_known(rig, replica)
            if chance.random() < 0.3:
                rig.restart()
            incarnation = catch_up(rig, replica, incarnation, chance)
            assert_everything_is_known(rig, replica)
        assert rig.verify() == []


def test_token_ids_that_the_disk_cannot_read_are_unknown() -> None:
    rig = Rig()
    rig.store([1, 2])
    rig.demote_all()
    rig.restart()
    page = rig.journal.snapshot(1 << 32)
    assert page.words is not None
    assert [chunk.tokens for chunk in page.chunks] == [b"", b""]
    for words in (b"", bytes(28), tokens_of(1) + bytes(8), tokens_of(1) + bytes(300)):
        known = page.with_words([words] * 2, rig.journal.chunk_tokens)
        assert {(chunk.tokens, chunk.adapter, chunk.salt_tag) for chunk in known.chunks} == {(b"", "", b"")}
    assert rig.headers.questions == 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_snapshot_taken_while_events_go_on_leads_to_what_is_stored(seed: int) -> None:
    rig, chance, replica = Rig(has_device=seed % 2 == 0), random.Random(seed), Replica()
    for _ in range(40):
        rig.random_step(chance)
    pages = pytest.MonkeyPatch()
    with pages.context() as patch:
        patch.setattr("kvpool.journal.journal.PAGE_CHUNKS_MAX", chance.randrange(1, 5))
        assert take_snapshot(rig, replica, between=lambda: rig.random_step(chance))
    follow(rig, replica)
    assert_everything_is_known(rig, replica)
    for _ in range(20):
        rig.random_step(chance)
        follow(rig, replica)
        assert_everything_is_known(rig, replica)
