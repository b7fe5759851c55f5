"""Pools on one shared store, scripted: what one publishes the other finds, and every failure of the store is a miss."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from kvpool.index.namespaces import Namespace
from kvpool.journal.engine_chunks import EngineChunk
from kvpool.key_column import KeyColumn
from kvpool.keys import Scope
from kvpool.pool.sharing.publications import PUBLISHED_S
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import seeking as sk
from kvpool.states import Level, ReportState
from kvpool.tiers.store.tier import StoreTier
from tests.rigs.clock import LaterClock
from tests.rigs.events.engine_chunks import ONE, Reported
from tests.rigs.store.scripted_store import SharedDirectory, planner
from tests.rigs.tiers.tiered_pool import CHUNK, TieredPool, key_of, medium_of, payload

pytestmark = pytest.mark.asyncio
KEYS = [key_of(1, number) for number in range(12)]
DRAM_CHUNKS = 24
OPTIONS = ("store.buffer=1MiB", "store.answer_timeout=10s", "store.miss_ttl=10ms", "store.master=localhost:1")


class Node:
    """A pool on the shared store."""

    def __init__(self, shared: SharedDirectory, *options: str, has_disk: bool = False, failures: int = 3) -> None:
        made: list[StoreTier] = []
        self.pool = TieredPool(
            [medium_of(2 * DRAM_CHUNKS)] if has_disk else [],
            DRAM_CHUNKS,
            *OPTIONS,
            *options,
            levels=[Level.SSD] if has_disk else [],
            kinds=[planner(shared, made, failures=failures)],
        )
        (self.store,) = made

    async def __aenter__(self) -> "Node":
        await self.pool.start()
        await self.pool.until_moved(lambda: self.store.process.is_serving)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.until_moved(lambda: self.pool.pool._tiering.holds == 0)
        await self.pool.stop()

    async def seek(self, keys: list[bytes]) -> int:
        """How many leading chunks the store seems to have."""
        return ((await self.seek_each(keys, are_alone=False)) + b"\0").index(0)

    async def seek_each(self, keys: list[bytes], *, are_alone: bool) -> bytes:
        """Which chunks the store seems to have, 1 for each."""
        seek = sk.Seek(np.array([len(keys)], "<u4").tobytes(), b"".join(keys), 60.0, are_alone)
        answer = await self.pool.pool.sharing.seeking.seek(self.pool.session, seek)
        return answer.there

    async def load(self, keys: list[bytes]) -> int:
        """Seek and load a chain: how many chunks have the right bytes."""
        await self.seek(keys)
        return await self.pool.load(keys)

    async def until_loaded(self, keys: list[bytes]) -> None:
        """Load again and again until all are there: absent objects are remembered for a while."""

        async def load_on() -> None:
            while await self.load(keys) != len(keys):
                await asyncio.sleep(0.01)

        await asyncio.wait_for(load_on(), 60.0)

    async def published(self, chunks: int) -> None:
        await self.pool.until_moved(lambda: self.counted("published_chunks") >= chunks)

    def counted(self, name: str) -> int:
        value = self.pool.pool.measure({}).tiers["store"][f"store.{name}"]
        assert isinstance(value, int)
        return value


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path)


async def publish(shared: SharedDirectory, keys: list[bytes]) -> None:
    """Have another node publish a chain."""
    async with Node(shared, "store.publish=all") as first:
        assert await first.pool.save(keys) == len(keys)
        await first.published(len(keys))


async def test_what_one_pool_publishes_another_finds(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off") as second:
        assert await second.pool.load(KEYS) == 0, "nobody has asked the store yet"
        assert await second.seek(KEYS) == len(KEYS)
        assert await second.load(KEYS) == len(KEYS)
        assert second.counted("pulled_chunks") == len(KEYS)
        asked = second.counted("queries")
        assert await second.seek(KEYS) == len(KEYS)
        assert second.counted("queries") == asked, "the answer is remembered"


async def test_the_store_is_not_asked_for_what_follows_a_chunk_that_it_lacks(shared: SharedDirectory) -> None:
    await publish(shared, KEYS[:5])
    async with Node(shared, "store.publish=off", "store.miss_ttl=60s") as second:
        assert await second.seek(KEYS[:8]) == 5
        assert await second.seek(KEYS) == 5
        assert second.counted("queries") == 1


async def test_the_store_is_asked_for_chunks_alone_that_follow_one_that_it_lacks(shared: SharedDirectory) -> None:
    await publish(shared, KEYS[:5])
    async with Node(shared, "store.publish=off", "store.miss_ttl=60s") as second:
        absent = KEYS[7:8]
        assert await second.seek_each(absent, are_alone=True) == bytes([0])
        assert await second.seek_each(absent + KEYS[:5], are_alone=False) == bytes(6), "of a chain nothing follows it"
        assert second.counted("queries") == 1
        assert await second.seek_each(absent + KEYS[:5], are_alone=True) == bytes([0, 1, 1, 1, 1, 1])
        assert second.counted("queries") == 2


async def test_a_chain_is_continued_from_the_store_behind_what_is_here(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off") as second:
        assert await second.pool.save(KEYS[:5]) == 5
        assert await second.seek(KEYS[5:]) == len(KEYS) - 5
        assert await second.pool.load(KEYS) == len(KEYS)
        assert second.counted("pulled_chunks") == len(KEYS) - 5


async def test_reused_chunks_are_published_after_their_lease_and_no_others(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=reused") as node:
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS[:4]) == 4
        await node.published(4)
        assert set(shared.objects()) == {key.hex() for key in KEYS[:4]}
        assert await node.pool.load(KEYS[:5]) == 5
        await node.published(5)
        assert len(shared.objects()) == 5


async def test_a_chunk_that_is_used_again_while_it_is_published_is_published_once(shared: SharedDirectory) -> None:
    shared.play(delay_s=0.3)
    async with Node(shared, "store.publish=reused") as node:
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS[:4]) == 4
        await node.pool.until_moved(lambda: node.counted("publishing_chunks") + node.counted("published_chunks") == 4)
        assert await node.pool.load(KEYS[:5]) == 5
        await node.published(5)
        assert set(shared.objects()) == {key.hex() for key in KEYS[:5]}
        assert node.counted("published_chunks") == 5


async def test_a_chunk_that_is_used_again_while_it_is_refused_is_tried_again(shared: SharedDirectory) -> None:
    shared.play(put_code=-200, delay_s=0.3)
    async with Node(shared, "store.publish=reused") as node:
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS[:4]) == 4
        await node.pool.until_moved(lambda: node.counted("publishing_chunks") + node.counted("unpublished_full") == 4)
        assert await node.pool.load(KEYS[:5]) == 5
        await node.pool.until_moved(lambda: node.counted("unpublished_full") == 4 + 5)
        assert node.counted("due_chunks") == 0


async def test_a_store_that_has_come_back_empty_gets_what_is_used_again(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=reused") as node:
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS) == len(KEYS)
        await node.published(len(KEYS))
        for file in shared.objects().values():
            file.unlink()
        node.store.process.kill("its segment is lost")
        await node.pool.until_moved(lambda: node.store.process.lives == 2 and node.store.is_usable)
        assert await node.pool.load(KEYS[:5]) == 5
        await node.published(len(KEYS) + 5)
        assert set(shared.objects()) == {key.hex() for key in KEYS[:5]}


async def test_what_the_store_has_lost_is_published_again_at_a_use_some_minutes_later(
    shared: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives on: a master has begun anew, or has dropped objects."""
    async with Node(shared, "store.publish=reused") as node:
        published = node.pool.pool.sharing.publications[0]._published
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS) == len(KEYS)
        await node.published(len(KEYS))
        for key in KEYS[:5]:
            shared.objects()[key.hex()].unlink()
        assert await node.pool.load(KEYS[:6]) == 6
        assert all(key in published for key in KEYS)
        clock = LaterClock()
        clock.advance(PUBLISHED_S)
        monkeypatch.setattr(published, "_clock", clock)
        assert not any(key in published for key in KEYS)
        assert await node.pool.load(KEYS[:6]) == 6
        await node.published(len(KEYS) + 5)
        assert set(shared.objects()) == {key.hex() for key in KEYS}
        await node.pool.until_moved(lambda: KEYS[5] in published)
        assert node.counted("published_chunks") == len(KEYS) + 5, "what it has is not sent"


async def test_a_slow_answer_about_what_is_published_costs_engines_nothing_and_no_chunk(
    shared: SharedDirectory,
) -> None:
    """Each chunk is due by a lease of its own; the store takes longer for each question than an engine waits."""
    shared.play(exist_delay_s=0.05)
    async with Node(shared, "store.publish=reused", "store.answer_timeout=20ms") as node:
        assert await node.pool.save(KEYS) == len(KEYS)
        for end in range(1, len(KEYS) + 1):
            assert await node.pool.load(KEYS[:end]) == end
        await node.published(len(KEYS))
        assert node.counted("suspensions") == node.counted("unpublished_left_out") == node.counted("late_answers") == 0
        assert set(shared.objects()) == {key.hex() for key in KEYS}


async def test_what_a_node_has_published_is_there_for_itself(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=all", "store.miss_ttl=1m") as node:
        assert await node.pool.save(KEYS) == len(KEYS)
        await node.published(len(KEYS))
        await node.pool.flush()
        assert await node.load(KEYS) == len(KEYS)


async def test_what_is_due_while_the_store_is_suspended_is_published_behind_that(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=all", failures=1) as node:
        shared.play(put_code=-900)
        assert await node.pool.save(KEYS[:1]) == 1
        await node.pool.until_moved(lambda: node.counted("suspensions") == 1)
        assert await node.pool.save(KEYS) == len(KEYS)
        shared.play()
        await node.published(len(KEYS) - 1)


async def test_what_another_node_has_published_is_not_sent_again(shared: SharedDirectory) -> None:
    await publish(shared, KEYS[:8])
    async with Node(shared, "store.publish=all") as second:
        published = second.pool.pool.sharing.publications[0]._published
        assert await second.pool.save(KEYS) == len(KEYS)
        await second.pool.until_moved(lambda: all(key in published for key in KEYS))
        assert second.counted("published_chunks") == len(KEYS) - 8


async def test_what_the_store_does_not_take_is_counted_and_sent_at_the_next_use(
    shared: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A breaker that opens between the look and the attempt."""
    async with Node(shared, "store.publish=reused") as node:
        await node.pool.save(KEYS)
        monkeypatch.setattr(node.store, "publish", lambda *_: False)
        assert await node.pool.load(KEYS) == len(KEYS)
        await node.pool.until_moved(lambda: node.counted("unpublished_left_out") == len(KEYS))
        assert (node.counted("due_chunks"), node.counted("publishing_chunks")) == (0, 0)
        monkeypatch.undo()
        assert await node.pool.load(KEYS[:5]) == 5
        await node.published(5)


async def test_retained_chunks_are_published_and_no_others(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=retained") as node:
        await node.pool.save(KEYS)
        answer = node.pool.pool.hints.retain(
            node.pool.session, m.Retain(b"".join(KEYS[:3]), bytes([90] * 3), bytes(12))
        )
        await node.pool.serve(answer)
        await node.published(3)
        assert set(shared.objects()) == {key.hex() for key in KEYS[:3]}


async def test_chunks_are_published_after_they_were_written_to_disk(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=reused", has_disk=True) as node:
        await node.pool.save(KEYS)
        assert await node.pool.load(KEYS[:6]) == 6
        await node.pool.until_moved(lambda: KEYS[5] in node.pool.pool.sharing.publications[0]._used)
        assert not shared.objects()
        assert await node.pool.demote() == 0
        await node.published(6)
        assert len(shared.objects()) == 6


async def test_a_chunk_in_an_engines_own_memory_is_not_on_disk(shared: SharedDirectory) -> None:
    async with Node(shared, "store.publish=all", has_disk=True) as node:
        journal, publications = node.pool.pool.journal, node.pool.pool.sharing.publications[0]
        reported = Reported(KeyColumn(b""), [EngineChunk(KEYS[0], b"", b"", Scope())])
        assert list(journal.take_report(ONE, node.pool.session.own.id, reported)) == [ReportState.TAKEN]
        await node.pool.save(KEYS[:1])
        await node.pool.until_moved(lambda: not journal.is_behind and publications._last == journal.newest)
        assert (publications.stats()["due_chunks"], publications.pins, shared.objects()) == (0, 0, {})
        assert await node.pool.demote() == 0
        await node.published(1)


@pytest.mark.parametrize("policy", ["off", "reused", "retained"])
async def test_a_chunk_that_does_not_qualify_is_not_published(shared: SharedDirectory, policy: str) -> None:
    async with Node(shared, f"store.publish={policy}") as node:
        await node.pool.save(KEYS)
        if policy == "off":
            assert await node.pool.load(KEYS) == len(KEYS)
    assert not shared.objects()


def _overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip_layer(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[-1] ^= 1
    path.write_bytes(value)


def _flip_header(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[160] ^= 1
    path.write_bytes(value)


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _other_chunk(path: Path) -> None:
    """Another chunk's object, good in itself, under this chunk's name."""
    other = next(one for one in path.parent.iterdir() if one != path)
    path.write_bytes(other.read_bytes())


async def test_wrong_bytes_under_a_chunks_name_are_a_miss_and_two_lines(
    shared: SharedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    spoils = (_overwrite, _flip_layer, _flip_header, _shorten, _lengthen, _other_chunk)
    chains = [[key_of(10 + chain, number) for number in range(8)] for chain in range(len(spoils))]
    with caplog.at_level("ERROR"):
        async with Node(shared, "store.publish=all") as first:
            for number, chain in enumerate(chains, 1):
                assert await first.pool.save(chain) == len(chain)
                await first.published(number * len(chain))
        for spoil, chain in zip(spoils, chains, strict=True):
            spoil(shared.objects()[chain[4].hex()])
        async with Node(shared, "store.publish=off", failures=100) as second:
            for spoil, chain in zip(spoils, chains, strict=True):
                assert await second.load(chain) == 4, spoil.__name__
                assert await second.pool.save(chain) == len(chain)
                assert await second.pool.load(chain) == len(chain)
            wrong = second.counted("wrong_objects")
    first_line, last_line = (record.getMessage() for record in caplog.records)
    place = rf"chunk {chains[0][4].hex()[:16]} at object kvpool/1/[0-9a-f]{{16}}/{chains[0][4].hex()}"
    assert re.fullmatch(rf"a chunk is bad in the store tier, and no engine gets it: {place}: other bytes", first_line)
    assert last_line.startswith(f"{wrong - 1} more chunks were bad in the store tier")


@pytest.mark.parametrize("code", [-704, *(pytest.param(code, marks=pytest.mark.slow) for code in (-707, -800)), -900])
async def test_an_object_that_the_store_cannot_deliver_is_a_miss(shared: SharedDirectory, code: int) -> None:
    await publish(shared, KEYS)
    shared.play(get_code=code)
    async with Node(shared, "store.publish=off") as second:
        assert await second.load(KEYS) == 0
        assert second.counted("gone_objects") == len(KEYS)
        shared.play()
        await second.pool.until_moved(lambda: second.store.is_usable)
        await second.until_loaded(KEYS)


async def test_a_false_exists_is_a_miss(shared: SharedDirectory) -> None:
    shared.play(exists=True)
    async with Node(shared, "store.publish=off") as node:
        assert await node.seek(KEYS) == len(KEYS)
        assert await node.pool.load(KEYS) == 0
        assert await node.pool.save(KEYS) == len(KEYS)


async def test_a_full_store_is_counted_and_stops_nothing(shared: SharedDirectory) -> None:
    shared.play(put_code=-200)
    async with Node(shared, "store.publish=all") as node:
        assert await node.pool.save(KEYS) == len(KEYS)
        await node.pool.until_moved(lambda: node.counted("unpublished_full") == len(KEYS))
        assert await node.pool.load(KEYS) == len(KEYS)
        shared.play()
        await node.pool.load(KEYS)
        await node.published(len(KEYS))


async def test_an_abort_of_the_library_is_a_miss_and_the_next_process_serves(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off") as second:
        shared.play(aborts=True)
        assert await second.load(KEYS) == 0
        shared.play()
        await second.pool.until_moved(lambda: second.store.process.lives == 2)
        assert await second.load(KEYS) == len(KEYS)


async def test_a_late_answer_is_a_miss_now_and_counts_for_the_next_lookup(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off", "store.answer_timeout=1ms") as second:
        shared.play(exist_delay_s=0.1)
        assert await second.seek(KEYS) == 0
        assert second.counted("late_answers") == 1
        await second.pool.until_moved(lambda: len(second.store._presence) > 0)
        assert await second.seek(KEYS) == len(KEYS)


async def test_a_store_that_fails_again_and_again_is_left_alone(shared: SharedDirectory) -> None:
    shared.play(exist_code=-900)
    async with Node(shared, "store.publish=off", failures=2) as node:
        for _ in range(2):
            assert await node.seek(KEYS) == 0
        assert not node.store.is_usable
        asked = node.counted("queries")
        assert await node.seek(KEYS) == 0
        assert node.counted("queries") == asked
        shared.play(exists=True)
        await node.pool.until_moved(lambda: node.store.is_usable)
        assert await node.seek(KEYS) == len(KEYS)
        assert node.pool.pool.measure({}).tiers["store"]["store.state"] == "ok"


async def test_a_fetch_that_takes_too_long_ends_and_its_memory_is_not_used_meanwhile(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off", "store.transfer_timeout=100ms") as second:
        shared.play(delay_s=0.5)
        assert await second.load(KEYS) == 0
        assert second.counted("late_transfers") == 1
        assert second.store._transfers._fetch_ranges.taken_bytes > 0
        await second.pool.until_moved(lambda: second.store._transfers._fetch_ranges.taken_bytes == 0)
        shared.play()
        await second.until_loaded(KEYS)


async def test_a_pull_under_way_at_the_end_is_cancelled(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    node = Node(shared, "store.publish=off")
    await node.pool.start()
    await node.pool.until_moved(lambda: node.store.process.is_serving)
    shared.play(delay_s=0.3)
    await node.seek(KEYS)
    assert await node.pool.load(KEYS, is_patient=False) == 0
    await node.pool.stop()


async def test_a_store_that_nobody_can_join_is_away_and_joined_later(shared: SharedDirectory) -> None:
    shared.play(refusal="no master")
    node = Node(shared)
    await node.pool.start()
    await node.pool.until_moved(lambda: node.store.process.error == "no master")
    assert await node.load(KEYS) == 0
    assert await node.pool.save(KEYS) == len(KEYS)
    assert node.pool.pool.info()["store_error"] == "no master"
    shared.play()
    await node.pool.until_moved(lambda: node.store.process.is_serving)
    await node.pool.stop()


async def test_a_node_of_another_layout_or_model_finds_nothing(shared: SharedDirectory) -> None:
    await publish(shared, KEYS)
    async with Node(shared, "store.publish=off") as second:
        own = second.pool.session.own
        other = Namespace(own.id, own.size_class, "another model", own.layout)
        assert await second.store.find_readable([(other, KeyColumn.of(KEYS))], 60.0) == bytes(len(KEYS))


async def test_an_object_is_a_header_page_and_the_chunk(shared: SharedDirectory) -> None:
    await publish(shared, KEYS[:1])
    value = shared.objects()[KEYS[0].hex()].read_bytes()
    assert len(value) == 4096 + CHUNK
    assert value[:8] == b"KVPSLOT1"
    assert value[4096:] == payload(KEYS[0])


async def test_a_pin_by_key_protects_the_slot_of_a_chunk_of_its_namespace_alone() -> None:
    pool = TieredPool([], DRAM_CHUNKS, levels=[])
    await pool.start()
    await pool.save(KEYS[:1])
    directory, own = pool.pool._directory, pool.session.own.id
    other = pool.pool.open_namespaces("another model", pool.session.layout)[0][0].id
    assert directory.pin_key(own, KEYS[1]) == 0
    assert directory.pin_key(other, KEYS[0]) == 0
    pin = directory.pin_key(own, KEYS[0])
    assert pin
    assert (directory.stats()["pinned"], directory.stats()["zombies"]) == (1, 0)
    await pool.flush()
    assert (directory.stats()["chunks"], directory.stats()["zombies"]) == (0, 1), "gone, and its slot is read still"
    assert directory.unpin(pin)
    assert directory.stats()["zombies"] == 0
    await pool.stop()
