"""Sets: chunks that an engine names each by a key of its own, without order and parents; every key has an answer of its own."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL, Daemon, Start, in_both_write_modes, wait_connected, wait_until
from tests.rigs.layouts import CASES, HYBRID, over
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import paged_layers, read_chunk
from tests.rigs.prompts import Ranks, prompt, store
from tests.rigs.runs.children import assert_in_child
from tests.rigs.sets import are_stored, found, load_set, names_of, rows_for, store_set
from tests.rigs.store.scripted_store import SharedDirectory
from tests.rigs.store.store_daemon import StoreDaemon

DRAM_CHUNKS = 24
CAPACITY = f"{DRAM_CHUNKS * SMALL.chunk_bytes}B"


@in_both_write_modes
@over()
def test_a_set_of_each_group_has_the_right_bytes_by_key(ranks: Ranks) -> None:
    for group in range(len(ranks.layout.group_layouts)):
        names = names_of(*range(1, 8))
        pool = ranks.first
        assert found(pool, names, group) == [0] * 7
        results = [store_set(each, names[:5], group) for each in ranks.pools]
        assert results[-1].states == ("stored",) * 5
        shuffled = names[[6, 3, 0, 5, 4, 2, 1]]
        assert found(pool, shuffled, group) == [0, 1, 1, 0, 1, 1, 1]
        for each in ranks.pools:
            held, result = load_set(each, shuffled, group)
            assert held == [False, True, True, False, True, True, True]
            assert (result.chunks, result.reason) == (5, "complete")
        assert store_set(pool, names[4:5], group).states in (("present",), ("part",))


def test_a_key_names_what_keys_from_hashes_of_that_hash_names(shared: Shared) -> None:
    with shared.connect() as pool:
        name = names_of(77)
        keys = pool.keys_from_hashes([name.tobytes()], block_tokens=SMALL.chunk_tokens)
        assert pool.save(keys, from_=rows_for(pool, name)).commit().stored == 1
        assert load_set(pool, name)[1].chunks == 1
        twice = names_of(78)
        assert store_set(pool, twice).stored == 1
        assert pool.lookup(pool.keys_from_hashes([twice.tobytes()], block_tokens=SMALL.chunk_tokens)).chunks == 1


def test_chunks_of_prompts_behind_others_and_of_other_salts_are_no_set(shared: Shared) -> None:
    with shared.connect() as pool, shared.connect(salt=b"another") as salted:
        names = names_of(1, 2)
        assert store_set(pool, names).stored == 2
        assert found(salted, names) == [0, 0]
        assert load_set(salted, names)[0] == [False, False]
        store(pool, prompt(pool, 1))
        assert load_set(pool, np.frombuffer(prompt(pool, 1)[1], np.uint8).reshape(1, 32))[0] == [False]


def test_a_key_that_is_named_twice_is_one_chunk(shared: Shared) -> None:
    with shared.connect() as pool:
        names = names_of(1, 2, 1, 3, 2, 1)
        result = store_set(pool, names[[0, 1, 2, 4]])
        assert sorted(result.states) == ["present", "present", "stored", "stored"]
        with pool.acquire_set(names) as lease:
            assert lease.held.tolist() == [True, True, True, False, True, True]
            assert (lease.chunks, len(lease.tiers)) == (5, 5)
        assert load_set(pool, names)[1].states == ("complete",) * 3 + ("absent",) + ("complete",) * 2


def test_a_key_that_is_named_twice_in_a_save_is_answered_by_its_first_and_waits_for_nobody(shared: Shared) -> None:
    with shared.connect() as pool, shared.connect() as other:
        names = names_of(1, 1, 2, 1)
        rows = rows_for(pool, names)
        rows[1] ^= 0xFF  # the bytes of the first count
        with pool.save_set(names, rows) as save:
            assert not save.has_pending()
            assert save.wait_pending(0.0)
            result = save.commit()
        assert result.states == ("stored", "present", "stored", "present")
        assert (result.stored, result.present, len(result.codes)) == (2, 2, 4)
        assert load_set(pool, names)[1].states == ("complete",) * 4
        assert store_set(pool, names).states == ("present",) * 4

        given_up = pool.save_set(names_of(3, 3), rows[:2])
        given_up.abort()
        assert given_up.commit().reasons == {"aborted": 2}

        writing = other.save_set(names_of(5), rows_for(other, names_of(5)))
        late = pool.save_set(names_of(5, 4, 5, 4), rows_for(pool, names_of(5, 4, 5, 4)))
        assert late.has_pending()
        assert not late.wait_pending(0.0)
        writing.commit()
        assert not late.has_pending()
        assert late.wait_pending(0.0)
        assert late.commit().states == ("present", "stored", "present", "present")


def test_states_and_retention_of_keys_that_are_named_twice_are_by_key_whatever_order_parents_make(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        store_set(pool, names_of(3))
        names, parents = names_of(1, 2, 2, 3, 4), names_of(2, 3, 9, 4, 9)
        kept = [kv.TokenRange(SMALL.chunk_tokens, 2 * SMALL.chunk_tokens, priority=90)]
        with pool.save_set(names, rows_for(pool, names), parents, kept) as save:
            assert save.commit().states == ("stored", "stored", "present", "present", "stored")
        assert load_set(pool, names)[1].chunks == 5
        assert store_set(pool, names_of(*range(100, 123))).stored == 23
        assert are_stored(pool, [1, 2, 3, 4]) == [False, True, False, False], "the second key's priority is high"
    assert daemon.problems() == []


def test_a_group_is_any_integer_and_a_set_has_its_own_alone(shared: Shared) -> None:
    with shared.connect(HYBRID) as pool:
        names = names_of(1, 2)
        for group in range(3):
            rows = rows_for(pool, names, group)
            layers = range(pool.shares[group].of_layout(pool.layout.group_layouts[group]).layers)
            with pool.save_set(names, rows, group=np.int64(group)) as save:  # type: ignore[arg-type]  # any integer
                for layer in layers:
                    save.layer(layer, *([] if layer % 2 else [np.int64(group)]))  # type: ignore[arg-type]  # likewise
                for other in {0, 1, 2, -1} - {group}:
                    with pytest.raises(kv.InvalidArgument, match=rf"group is {other}, expected {group}, the only one"):
                        save.layer(0, other)
                assert save.commit().stored == 2
            number: Any = np.int64(group)
            assert pool.probe(names, number).tolist() == [1, 1]
            into = np.zeros_like(rows)
            with pool.acquire_set(names, number) as lease:
                assert lease.held.all()
                load = pool.load_set(lease, into)
                for layer in layers:
                    assert load.wait_layer(layer)
                    assert load.wait_layer(layer, None, group)
                for other in {0, 1, 2} - {group}:
                    with pytest.raises(kv.InvalidArgument, match=rf"group is {other}, expected {group}, the only one"):
                        load.wait_layer(0, group=other)
                assert load.wait().chunks == 2
            assert np.array_equal(into, rows)
        for wrong in (True, 0.0, "0", None, 3, -1):
            of_group: Any = wrong
            for attempt in (
                partial(pool.probe, names, of_group),
                partial(pool.acquire_set, names, of_group),
                partial(pool.save_set, names, rows, group=of_group),
            ):
                with pytest.raises(kv.InvalidArgument, match="group is"):
                    attempt()
        assert pool.connected
        with pool.save_set(names[:0], rows[:0], group=2) as save, pytest.raises(kv.InvalidArgument, match="group is 1"):
            save.layer(0, 1)


def test_addresses_are_any_integers_that_are_addresses(shared: Shared) -> None:
    with shared.connect() as pool:
        names = names_of(1, 2, 3)
        rows = rows_for(pool, names)
        places = [row.ctypes.data for row in rows]
        assert pool.save_set(names, [np.int64(place) for place in places]).commit().stored == 3
        into = np.zeros_like(rows)
        wanted = [row.ctypes.data for row in into]
        with pool.acquire_set(names) as lease:
            for given in (tuple(wanted), [np.uint64(place) for place in wanted], np.array(wanted, ">i8")):
                into[:] = 0
                assert pool.load_set(lease, given).wait().chunks == 3
                assert np.array_equal(into, rows)


def test_a_load_has_rows_of_their_own_and_a_save_may_read_one_twice(shared: Shared) -> None:
    with shared.connect() as pool:
        names = names_of(1, 2, 3)
        row = rows_for(pool, names)[1]
        assert pool.save_set(names, [row.ctypes.data] * 3).commit().stored == 3
        size = SMALL.chunk_bytes
        memory = np.full((4, size), 0xA5, np.uint8)
        first = memory.ctypes.data
        with pool.acquire_set(names) as lease:
            for places, pair in (
                ([first, first + size, first], "rows.0. and rows.2."),
                ([first + 2 * size, first, first + 1], "rows.1. and rows.2."),
                ([first + 2 * size - 1, first, first + size], "rows.0. and rows.2."),
            ):
                for given in (places, np.array(places)):
                    with pytest.raises(kv.InvalidArgument, match=pair):
                        pool.load_set(lease, given)
            assert (memory == 0xA5).all()
            assert pool.load_set(lease, [first + 2 * size, first, first + size]).wait().chunks == 3
        assert np.array_equal(memory[:3], [row] * 3)

        layers = paged_layers(SMALL, 6, 16, "kv_first")
        cache = pool.register(layers, 16, "kv_first")
        with pool.acquire_set(names) as lease:
            assert pool.load_set(lease, cache=cache, block_ids=[0, 1, 2, 3, 4, 5]).wait().chunks == 3
        again = names_of(4, 5)
        assert pool.save_set(again, cache=cache, block_ids=[2, 3, 2, 3]).commit().stored == 2
        into = np.zeros((2, size), np.uint8)
        with pool.acquire_set(again) as lease:
            assert pool.load_set(lease, into).wait().chunks == 2
            with pytest.raises(kv.InvalidArgument, match=r"block_ids\[0\] and block_ids\[2\] are both 2"):
                pool.load_set(lease, cache=cache, block_ids=[2, 3, 2, 3])
        assert np.array_equal(into, [row] * 2)
        for blocks, place in (([2, 2, 6, 6], 2), ([2, -1, 2, 3], 1)):
            with pytest.raises(kv.InvalidArgument, match=rf"block_ids\[{place}\] is"):
                pool.save_set(again, cache=cache, block_ids=blocks)


def test_a_probe_asks_the_store_for_keys_behind_one_that_it_lacks(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path)
    with (
        StoreDaemon(tmp_path / "there", shared, **{"store.publish": "all"}) as there,
        StoreDaemon(tmp_path / "here", shared, **{"store.miss_ttl": "60s"}) as here,
        there.connect() as owner,
        here.connect() as pool,
    ):
        names = names_of(*range(1, 5))
        assert store_set(owner, names).stored == 4
        there.wait_published(4)
        absent = names_of(100)
        assert pool.probe(absent, asks_store=True).tolist() == [0]
        assert pool.probe(np.concatenate([absent, names]), asks_store=True).tolist() == [0, 4, 4, 4, 4]
        assert load_set(pool, names)[1].chunks == 4


def test_an_empty_set_asks_nobody(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared.connect() as pool:
        monkeypatch.setattr(Session, "call", lambda *_: pytest.fail("a request"))
        names = np.empty((0, 32), np.uint8)
        assert found(pool, names) == []
        lease = pool.acquire_set(names)
        assert (lease.chunks, lease.held.tolist(), lease.tokens, lease.cost_s) == (0, [], 0, 0.0)
        assert pool.load_set(lease, np.empty((0, SMALL.chunk_bytes), np.uint8)).wait().states == ()
        result = pool.save_set(names, np.empty((0, SMALL.chunk_bytes), np.uint8)).commit()
        assert (result.states, result.stored) == ((), 0)


def test_rows_may_be_addresses_or_blocks_of_a_cache(shared: Shared) -> None:
    with shared.connect() as pool:
        names, size = names_of(1, 2, 3), SMALL.chunk_bytes
        rows = rows_for(pool, names)
        memory = [ctypes.create_string_buffer(rows[number].tobytes(), size) for number in (0, 1, 2)]
        places = [ctypes.addressof(each) for each in memory]
        assert pool.save_set(names, places).commit().stored == 3
        into = np.zeros_like(rows)
        with pool.acquire_set(names) as lease:
            wanted = np.array([into[number].ctypes.data for number in range(3)], np.uint64)
            assert pool.load_set(lease, wanted).wait().chunks == 3
            assert np.array_equal(into, rows)
            layers = paged_layers(SMALL, 6, 16, "kv_first")
            cache = pool.register(layers, 16, "kv_first")
            assert pool.load_set(lease, cache=cache, block_ids=[4, 5, 2, 3, 0, 1]).wait().chunks == 3
        for number, blocks in enumerate(([4, 5], [2, 3], [0, 1])):
            assert np.array_equal(read_chunk(layers, "kv_first", blocks, SMALL).reshape(-1), rows[number])
        again = names_of(4, 5, 6)
        assert pool.save_set(again, cache=cache, block_ids=[4, 5, 2, 3, 0, 1]).commit().stored == 3
        with pool.acquire_set(again) as lease:
            into[:] = 0
            assert pool.load_set(lease, into).wait().chunks == 3
        assert np.array_equal(into, rows)


def test_keys_whose_blocks_are_left_out_are_neither_read_nor_verified(shared: Shared) -> None:
    with shared.connect() as pool:
        names = names_of(1, 2, 9, 3, 4)
        store_set(pool, names[[0, 1, 3, 4]])
        rows = rows_for(pool, names)
        layers = paged_layers(SMALL, 8, 16, "kv_first")
        cache = pool.register(layers, 16, "kv_first")
        with pool.acquire_set(names) as lease:
            assert lease.hold.session is not None
            offset = int(np.frombuffer(lease.hold.leased.offsets, "<u8")[0])
            lease.hold.session.arena.view()[offset + 5] ^= 1
            load = pool.load_set(lease, cache=cache, block_ids=[-1, -1, -1, -1, 2, 3, 4, -1, 6, 7])
            result = load.wait()
            assert result.states == ("skipped", "skipped", "absent", "complete", "complete")
            assert (result.chunks, result.reason, load.chunks_so_far) == (2, "complete", 2)
            assert all(load.wait_layer(layer) for layer in range(SMALL.layers))
            skipped = pool.load_set(lease, cache=cache, block_ids=[-1] * 10).wait()
            assert (skipped.chunks, skipped.reason) == (0, "complete")
            lease.hold.session.arena.view()[offset + 5] ^= 1
        assert np.array_equal(read_chunk(layers, "kv_first", [6, 7], SMALL).reshape(-1), rows[4])
        assert "loads_checksum" not in pool.stats()


def test_a_flipped_bit_fails_its_key_alone_and_drops_its_chunk(shared: Shared) -> None:
    with shared.connect() as pool:
        names = names_of(1, 2, 9, 3, 4, 2)
        store_set(pool, names[[0, 1, 3, 4]])
        rows = rows_for(pool, names)
        into = np.zeros_like(rows)
        with pool.acquire_set(names) as lease:
            offset = int(np.frombuffer(lease.hold.leased.offsets, "<u8")[1])
            assert lease.hold.session is not None
            lease.hold.session.arena.view()[offset + 5] ^= 1
            load = pool.load_set(lease, into)
            result = load.wait()
            assert result.states == ("complete", "checksum", "absent", "complete", "complete", "checksum")
            assert (result.chunks, result.reason, load.chunks_so_far) == (3, "checksum", 3)
            assert not load.wait_layer(0)
            for number in (0, 3, 4):
                assert np.array_equal(into[number], rows[number])
        assert found(pool, names) == [1, 0, 0, 1, 1, 0]
        assert pool.stats()["loads_checksum"] == 1
        assert shared.daemon.stats()["checksum_failures"] >= 1


def test_a_set_is_leased_by_one_request_loaded_by_one_job_and_saved_by_two(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[type] = []
    call = Session.call

    def noted(session: Session, request: object, *rest: object) -> object:
        asked.append(type(request))
        return call(session, request, *rest)  # type: ignore[arg-type]  # as it came

    with shared.connect() as pool:
        names = names_of(*range(40))
        monkeypatch.setattr(Session, "call", noted)
        assert store_set(pool, names).stored == 40
        assert asked == [m.Reserve, m.Commit]
        assert pool.probe(names).all()
        assert asked == [m.Reserve, m.Commit], "a probe asks nobody"
        assert load_set(pool, names)[1].chunks == 40
        assert asked == [m.Reserve, m.Commit, m.Acquire]
        assert (pool.stats()["loads"], pool.stats()["loaded_chunks"], "lookups" in pool.stats()) == (1, 40, False)
        pool.probe(names_of(1, 2, 99), is_counted=True)
        assert (pool.stats()["lookups"], pool.stats()["lookup_hit_chunks"]) == (1, 2)


def test_two_clients_share_a_set_and_each_key_is_stored_once(shared: Shared) -> None:
    with shared.connect() as one, shared.connect() as other:
        names = names_of(*range(6))
        first = one.save_set(names[:4], rows_for(one, names[:4]))
        second = other.save_set(names, rows_for(other, names))
        late = second.commit()
        assert late.states == ("declined",) * 4 + ("stored",) * 2
        assert [late.reason_of(number) for number in range(6)] == ["pending"] * 4 + [""] * 2
        assert first.commit().states == ("stored",) * 4
        with one.acquire_set(names) as lease:
            assert lease.held.all()
            assert load_set(other, names)[1].chunks == 6


def test_what_does_not_fit_is_declined_by_key_and_what_is_leased_stays(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        held = names_of(*range(20))
        assert store_set(pool, held).stored == 20
        with pool.acquire_set(held) as lease:
            assert lease.chunks == 20
            result = store_set(pool, names_of(*range(100, 110)))
            assert result.states == ("stored",) * 4 + ("declined",) * 6, "the first ones get the room"
            assert set(result.reasons) == {"full"}
            assert load_set(pool, held)[1].chunks == 20
        assert store_set(pool, names_of(*range(200, 210))).stored == 10
    assert daemon.problems() == []


def test_a_set_is_evicted_from_its_last_key_on(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        assert store_set(pool, names_of(*range(DRAM_CHUNKS))).stored == DRAM_CHUNKS
        assert store_set(pool, names_of(100, 101, 102)).stored == 3
        assert are_stored(pool, range(DRAM_CHUNKS)) == [True] * 21 + [False] * 3
        with pool.acquire_set(names_of(5, 6, 7, 8)):
            pass  # used: 8 first, 5 last
        assert store_set(pool, names_of(*range(200, 220))).stored == 20
        assert are_stored(pool, range(21)) == [number in (5, 6, 7, 8) for number in range(21)]
        store_set(pool, names_of(300, 301, 302, 303, 304))
        assert are_stored(pool, [5, 6, 7, 8])[-1] is False
    assert daemon.problems() == []


@in_both_write_modes
@pytest.mark.parametrize("is_retained", [False, True])
@pytest.mark.parametrize("name", ["plain", "windows"])
def test_a_set_that_is_present_is_used_in_its_order(start_daemon: Start, name: str, is_retained: bool) -> None:
    layout, count, more = CASES[name].layout, 300, 20
    size = layout.group_layouts[0].chunk_bytes
    daemon = start_daemon(dram__capacity=f"{count * size}B")
    with daemon.connect(layout, timeout_s=60.0) as pool:
        order = np.random.default_rng(7).permutation(count).tolist()
        for first in range(0, count, 30):
            assert store_set(pool, names_of(*order[first : first + 30])).stored == 30
        names = names_of(*range(count))
        kept = [kv.TokenRange(0, count * layout.chunk_tokens, priority=35)] if is_retained else []
        with pool.save_set(names, rows_for(pool, names), None, kept) as save:
            assert save.commit().states == ("present",) * count
        assert store_set(pool, names_of(*range(1000, 1000 + more))).stored == more
        left = [True] * (count - more)
        expected = left + [False] * more if layout.group_layouts[0].is_chained else [False] * more + left
        assert are_stored(pool, range(count)) == expected
    assert daemon.problems() == []


@in_both_write_modes
@pytest.mark.parametrize("name", ["plain", "windows", "hybrid", "heads", "divided"])
def test_what_a_save_calls_present_is_evicted_for_nothing_of_it(start_daemon: Start, name: str) -> None:
    case = CASES[name]
    for group, part in enumerate(case.layout.group_layouts):
        daemon = start_daemon(dram__capacity=f"{400 * part.chunk_bytes}B")
        with Ranks(case, partial(daemon.connect, timeout_s=60.0)) as ranks:
            names = names_of(*range(480))
            for first in range(0, 480, 30):
                for pool in ranks.pools:
                    store_set(pool, names[first : first + 30], group)
            room = sum(map(bool, found(ranks.first, names, group)))
            assert 80 < room < 480
            daemon.kill()
            daemon.start()
            for pool in ranks.pools:
                wait_connected(pool)
            head = room * 3 // 4
            for first in range(0, head, 30):
                for pool in ranks.pools:
                    store_set(pool, names[first : min(first + 30, head)], group)
            assert all(found(ranks.first, names[:head], group))
            results = [store_set(pool, names[: room + 20], group) for pool in ranks.pools]
            for result in results:
                assert result.states[:head] == ("present",) * head
            there = [state in ("present", "stored") for state in results[-1].states]
            assert [level > 0 for level in found(ranks.first, names[: room + 20], group)] == there
            assert sum(there) == room or len(ranks.pools) > 1
            assert results[-1].reasons
        assert daemon.problems() == []


def test_what_is_leased_by_another_leaves_the_tail_of_a_set_without_room(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool, daemon.connect() as other:
        theirs, names = names_of(*range(500, 512)), names_of(*range(24))
        assert store_set(other, theirs).stored == 12
        with other.acquire_set(theirs):
            assert store_set(pool, names[:12]).stored == 12
            result = store_set(pool, names)
            assert result.states == ("present",) * 12 + ("declined",) * 12
            assert dict(result.reasons) == {"full": 12}
            assert are_stored(pool, range(24)) == [True] * 12 + [False] * 12
            late = store_set(pool, names[::-1].copy())
            assert late.states == ("stored",) * 12 + ("declined",) * 12, "the first ones get the room"
            assert are_stored(pool, range(24)) == [False] * 12 + [True] * 12
    assert daemon.problems() == []


def test_parents_order_eviction_and_are_no_part_of_the_key(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        # A prompt of 12 chunks in any order: each names the one before it; the first an absent one.
        order = np.random.default_rng(5).permutation(12).tolist()
        names = names_of(*[1000 + number for number in order])
        parents = names_of(*[999 + number for number in order])
        result = store_set(pool, names, parents=parents)
        assert result.states == ("stored",) * 12
        assert load_set(pool, names)[1].chunks == 12
        with pool.acquire_set(names_of(*range(1000, 1012))):
            pass
        again = store_set(pool, names, parents=parents)
        assert again.states == ("present",) * 12
        assert store_set(pool, names_of(*range(DRAM_CHUNKS - 12))).stored == 12
        gone = []
        for number in range(6):
            store_set(pool, names_of(5000 + number))
            left = are_stored(pool, range(1000, 1012))
            gone.append(left.index(False) if False in left else 12)
            assert left == [True] * gone[-1] + [False] * (12 - gone[-1]), "from the end of the prompt on"
        assert gone == [11, 10, 9, 8, 7, 6]
        circle = names_of(7000, 7001)
        assert store_set(pool, circle, parents=circle[::-1].copy()).stored == 2
        assert load_set(pool, circle)[1].chunks == 2
    assert daemon.problems() == []


def test_states_and_retention_are_by_key_whatever_order_parents_make(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        store_set(pool, names_of(3))
        names, parents = names_of(1, 2, 3, 4), names_of(2, 3, 4, 9)
        kept = [kv.TokenRange(SMALL.chunk_tokens, 2 * SMALL.chunk_tokens, priority=90)]
        with pool.save_set(names, rows_for(pool, names), parents, kept) as save:
            result = save.commit()
        assert result.states == ("stored", "stored", "present", "stored")
        assert load_set(pool, names)[1].chunks == 4
        assert store_set(pool, names_of(*range(100, 123))).stored == 23
        assert are_stored(pool, [1, 2, 3, 4]) == [False, True, False, False], "the second key's priority is high"
    assert daemon.problems() == []


def test_chunks_on_disk_are_promoted_each_alone(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(ssd__path=str(tmp_path / "ssd"), ssd__capacity="64MiB")
    daemon.wait_open()
    with daemon.connect() as pool, daemon.admin() as admin:
        names = names_of(*range(30))
        assert store_set(pool, names[:20]).stored == 20
        assert admin.demote_all(60.0)["left"] == 0
        admin.flush(None, None, "dram")
        assert store_set(pool, names[20:25]).stored == 5
        mixed = names[[29, 0, 21, 7, 28, 3, 24, 19]]
        assert found(pool, mixed) == [0, 2, 1, 2, 0, 2, 1, 2]
        held, result = load_set(pool, mixed)
        assert held == [False, True, True, True, False, True, True, True]
        assert (result.chunks, result.reason) == (6, "complete")
        wait_until(lambda: found(pool, mixed) == [0, 1, 1, 1, 0, 1, 1, 1], "they have landed")
        assert load_set(pool, names)[1].chunks == 25
        daemon.kill()
        daemon.start()
        daemon.wait_open()
        wait_connected(pool)
        wait_until(lambda: load_set(pool, names[:20])[1].chunks == 20, "they are found after a restart")
    assert daemon.problems() == []


def test_chunks_of_another_node_alone_are_pulled(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect() as there, here.connect() as pool:
        names = names_of(*range(8))
        assert store_set(there, names[:6]).stored == 6
        wait_until(lambda: found(pool, names) == [3] * 6 + [0] * 2, "the hints have come")
        assert store_set(pool, names[7:]).stored == 1
        held, result = load_set(pool, names)
        assert held == [True] * 6 + [False, True]
        assert (result.chunks, result.reason) == (7, "complete")
        assert here.stats()["peer.pulled_chunks"] == 6
        owner.kill()
        assert load_set(pool, names)[1].chunks == 7, "they are here now"


@pytest.mark.parametrize("is_back", [False, True])
def test_a_load_may_outlive_the_daemon_and_its_connection(start_daemon: Start, *, is_back: bool) -> None:
    """The chunks' memory is there still, and their generations stand."""
    daemon = start_daemon()
    with daemon.connect(timeout_s=20.0) as pool:
        names = names_of(1, 2, 3)
        rows = rows_for(pool, names)
        store_set(pool, names[:2])
        lease = pool.acquire_set(names)
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client knows")
        if is_back:
            daemon.start()
            wait_connected(pool)
        into = np.zeros_like(rows)
        result = pool.load_set(lease, into, may_outlive=True).wait()
        assert result.states == ("complete", "complete", "absent")
        assert np.array_equal(into[:2], rows[:2])
        lease.release()
        assert pool.load_set(lease, into, may_outlive=True).wait().states[:2] != ("complete",) * 2


def test_a_daemon_that_dies_in_between_is_a_miss_of_each_key(start_daemon: Start) -> None:
    daemon = start_daemon()
    with daemon.connect(timeout_s=20.0) as pool:
        names = names_of(1, 2, 3)
        rows = rows_for(pool, names)
        store_set(pool, names)
        lease = pool.acquire_set(names)
        save = pool.save_set(names_of(4, 5), rows[:2])
        daemon.kill()
        wait_until(lambda: not pool.connected, "the client knows")
        result = pool.load_set(lease, np.zeros_like(rows)).wait()
        assert (result.states, result.reason) == (("disconnected",) * 3, "disconnected")
        assert save.commit().states == ("declined",) * 2
        assert found(pool, names) == [0] * 3
        gone = pool.acquire_set(names)
        assert (gone.chunks, gone.held.tolist()) == (0, [False] * 3)
        assert pool.load_set(gone, np.zeros_like(rows)).wait().states == ("absent",) * 3
        away = store_set(pool, names)
        assert (away.states, dict(away.reasons)) == (("declined",) * 3, {"disconnected": 3})
        lease.release()
        daemon.start()
        wait_connected(pool)
        assert found(pool, names) == [0] * 3
        assert store_set(pool, names).stored == 3
        assert load_set(pool, names)[1].chunks == 3


def test_a_released_or_expired_lease_loads_nothing_that_another_chunk_has_overwritten(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, server__lease_ttl="1s")
    with daemon.connect() as pool:
        names = names_of(*range(DRAM_CHUNKS))
        store_set(pool, names)
        into = np.zeros((DRAM_CHUNKS, SMALL.chunk_bytes), np.uint8)
        released = pool.acquire_set(names)
        released.release()
        released.release()
        assert pool.load_set(released, into).wait().states == ("gone",) * DRAM_CHUNKS
        expired = pool.acquire_set(names)
        wait_until(lambda: daemon.stats()["leases"] == 0, "it has expired")
        assert store_set(pool, names_of(*range(100, 110))).stored == 10
        result = pool.load_set(expired, into).wait()
        assert set(result.states) == {"complete", "gone"}
        assert result.states.count("gone") == 10
        expected = rows_for(pool, names)
        for number, state in enumerate(result.states):
            assert state != "complete" or np.array_equal(into[number], expected[number])
        expired.release()
    assert daemon.problems() == []


def test_what_was_evicted_since_the_probe_is_absent_and_the_rest_is_leased(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY)
    with daemon.connect() as pool:
        names = names_of(*range(DRAM_CHUNKS))
        store_set(pool, names)
        assert found(pool, names) == [1] * DRAM_CHUNKS
        store_set(pool, names_of(500, 501, 502, 503))
        held, result = load_set(pool, names)
        assert held == [True] * 20 + [False] * 4
        assert (result.chunks, result.reason) == (20, "complete")


def test_a_scheduler_probes_and_leases_over_all_ranks(shared: Shared) -> None:
    parts = [replace(SMALL, rank=rank, world=2) for rank in (0, 1)]
    whole = replace(SMALL, rank=None, world=2)
    with shared.connect(parts[0]) as first, shared.connect(parts[1]) as second, shared.connect(whole) as scheduler:
        names = names_of(1, 2, 3)
        assert store_set(first, names).stored == 3
        assert found(scheduler, names) == [0, 0, 0]
        assert store_set(second, names[[0, 2]]).stored == 2
        assert found(scheduler, names) == [1, 0, 1]
        with scheduler.acquire_set(names) as lease:
            assert lease.held.tolist() == [True, False, True]
            assert lease.ticket() == b""
            with pytest.raises(kv.InvalidArgument, match="rank=None"):
                scheduler.load_set(lease, np.zeros((3, SMALL.chunk_bytes), np.uint8))


def test_a_lease_of_a_set_is_no_lease_of_a_prompt(shared: Shared) -> None:
    with shared.connect() as pool:
        names, keys = names_of(1), prompt(pool, 5)
        store_set(pool, names)
        store(pool, keys)
        rows = np.zeros((1, SMALL.chunk_bytes), np.uint8)
        with pool.acquire_set(names) as lease, pool.acquire(pool.lookup(keys)) as prompt_lease:
            assert lease.ticket() == b""
            for attempt in (partial(pool.load, lease, into=rows), partial(pool.leased_memory, lease)):
                with pytest.raises(kv.InvalidArgument, match="load_set"):
                    attempt()
            with pytest.raises(kv.InvalidArgument, match="expected what acquire_set answered"):
                pool.load_set(prompt_lease, rows)
            assert prompt_lease.held.tolist() == [True] * prompt_lease.chunks
            assert pool.load_set(lease, rows).wait().chunks == 1


def _bad_arguments(pool: Any, lease: kv.Lease) -> dict[str, tuple[Callable[[], object], str]]:
    good, rows = names_of(1, 2), np.zeros((2, SMALL.chunk_bytes), np.uint8)
    buffer = ((ctypes.c_uint8 * 32) * 2)()
    bad: dict[str, tuple[object, str]] = {
        "an array of ctypes": (buffer, "keys is c_"),
        "memory of one": (memoryview(buffer), "keys is memoryview"),
        "memory": (good.data, "keys is memoryview"),
        "a list": ([b"x" * 32], "keys is list"),
        "31 bytes": (np.zeros((2, 31), np.uint8), r"keys is uint8 \[2, 31\]"),
        "one axis": (np.zeros(32, np.uint8), r"keys is uint8 \[32\]"),
        "words": (np.zeros((2, 32), np.int64), "keys is int64"),
        "gaps": (np.zeros((4, 32), np.uint8)[::2], "with gaps"),
    }
    calls: dict[str, tuple[Callable[[], object], str]] = {}
    for name, (keys, word) in bad.items():
        calls[f"probe of {name}"] = partial(pool.probe, keys), word
        calls[f"acquire of {name}"] = partial(pool.acquire_set, keys), word
        calls[f"save of {name}"] = partial(pool.save_set, keys, rows), word
    calls["another group"] = partial(pool.probe, good, 1), "group is 1"
    calls["no group"] = partial(pool.acquire_set, good, -1), "group is -1"
    calls["too many"] = partial(pool.acquire_set, np.zeros((4097, 32), np.uint8)), "4097, expected at most 4096"
    calls["parents of fewer"] = partial(pool.save_set, good, rows, names_of(1)), "parents are 1, expected 2"
    calls["parents in a buffer"] = partial(pool.save_set, good, rows, buffer), "parents is c_"
    calls["parents in a list"] = partial(pool.save_set, good, rows, [None]), "parents is list"
    calls["rows of fewer"] = partial(pool.save_set, good, rows[:1]), "1 rows, expected 2"
    calls["rows of another size"] = partial(pool.save_set, good, rows[:, :-1].copy()), "bytes"
    calls["addresses of fewer"] = partial(pool.save_set, good, [4096]), "1 addresses, expected 2"
    place = rows.ctypes.data
    for name, wrong in {
        "0": 0,
        "below 0": -5,
        "2^63": 1 << 63,
        "2^64": 1 << 64,
        "a bool": True,
        "a float": 4096.0,
        "an array": rows[0],
    }.items():
        calls[f"address {name} to save"] = partial(pool.save_set, good, [place, wrong]), r"rows\[1\] is .*address"
        calls[f"address {name} to load"] = partial(pool.load_set, lease, (wrong, place)), r"rows\[0\] is .*address"
    calls["address 0"] = partial(pool.save_set, good, np.zeros(2, np.uint64)), r"rows\[0\] is 0"
    calls["address 2^63"] = partial(pool.save_set, good, np.array([place, 1 << 63], np.uint64)), r"rows\[1\] is 9223"
    calls["addresses far apart to save"] = partial(pool.save_set, good, [place, 1 << 62]), "up to 0x4000000000000000"
    calls["addresses far apart to load"] = partial(pool.load_set, lease, [place, 1 << 62]), "one process's memory"
    calls["narrow addresses"] = partial(pool.save_set, good, np.ones(2, np.int32)), "rows has shape .* of int32"
    calls["rows of floats"] = partial(pool.load_set, lease, rows.view(np.float16)), "rows has shape .* of float16"
    calls["rows of no array"] = partial(pool.load_set, lease, object()), "rows is object"
    calls["no rows"] = partial(pool.save_set, good), "either cache and block_ids"
    calls["load of fewer rows"] = partial(pool.load_set, lease, rows[:1]), "1 rows, expected 2"
    calls["load without rows"] = partial(pool.load_set, lease), "either cache and block_ids"
    calls["no lease"] = partial(pool.load_set, None, rows), "lease is NoneType"
    calls["save of too many"] = partial(pool.save_set, np.zeros((4097, 32), np.uint8), rows), "at most 4096"
    calls["retention"] = partial(pool.save_set, good, rows, None, [3]), "retention"
    return calls


def test_mistakes_are_named_at_the_call(shared: Shared) -> None:
    with shared.connect() as pool:
        store_set(pool, names_of(1, 2))
        with pool.acquire_set(names_of(1, 2)) as lease:
            for name, (attempt, word) in _bad_arguments(pool, lease).items():
                with pytest.raises(kv.InvalidArgument, match=word):
                    pytest.fail(f"{name}: {attempt()}")
            assert load_set(pool, names_of(1, 2))[1].chunks == 2


def test_quotas_bound_what_sets_hold(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity=CAPACITY, dram__connection_quota="0.25", server__max_leases="3")
    with daemon.connect() as pool, daemon.connect() as other:
        for first in range(0, DRAM_CHUNKS, 6):
            store_set(pool, names_of(*range(first, first + 6)))
        with other.acquire_set(names_of(23)), pool.acquire_set(names_of(*range(DRAM_CHUNKS))) as lease:
            held = lease.held.tolist()
            assert 0 < sum(held) < DRAM_CHUNKS
            assert held == sorted(held, reverse=True), "the first ones are leased"
        leases = [pool.acquire_set(names_of(number)) for number in range(4)]
        assert [one.chunks for one in leases] == [1, 1, 1, 0]
        for one in leases:
            one.release()
    assert daemon.problems() == []


def test_a_hundred_sets_leave_nothing_held(start_daemon: Start) -> None:
    daemon: Daemon = start_daemon(dram__capacity=CAPACITY)
    chance = np.random.default_rng(3)
    with daemon.connect() as pool, daemon.connect() as other:
        for _ in range(100):
            names = names_of(*chance.integers(0, 60, int(chance.integers(1, 12))).tolist())
            each = pool if chance.random() < 0.5 else other
            if chance.random() < 0.5:
                save = each.save_set(names, rows_for(each, names))
                if chance.random() < 0.8:
                    save.commit()
                else:
                    save.abort()
            else:
                assert load_set(each, names)[1].reason == "complete"
        wait_until(lambda: daemon.stats()["leases"] == daemon.stats()["reservations"] == 0, "nothing is under way")
    assert daemon.problems() == []


def test_a_load_that_may_outlive_is_the_parents_alone(shared: Shared) -> None:
    """A forked child has no thread that copies: it does not wait for one."""
    with shared.connect() as pool:
        names = names_of(1, 2)
        rows = rows_for(pool, names)
        store_set(pool, names)
        into = np.zeros_like(rows)
        with pool.acquire_set(names) as lease:

            def load_in_child() -> bool:
                result = pool.load_set(lease, into, may_outlive=True).wait()
                return result.states == ("disconnected",) * 2 and not into.any()

            assert_in_child(load_in_child)
            assert pool.load_set(lease, into, may_outlive=True).wait().chunks == 2
        assert np.array_equal(into, rows)
