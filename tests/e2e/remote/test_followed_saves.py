"""Saves that another node follows: what is announced there is in place here before the save is committed, and never whole."""

from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool.states import Level
from tests.rigs.daemon import SMALL, WRITE_MODES, wait_until
from tests.rigs.layouts import FULL, HYBRID
from tests.rigs.nodes.two_daemons import two_daemons
from tests.rigs.payload import assert_right_bytes, load_all, payload_of, store, tokens_of
from tests.rigs.prompts import begin

CHUNKS = 12
LAST = SMALL.layers - 1


def announce_all_but_the_last(save: kv.Save) -> None:
    """Announce the layers one by one, each when the one before is copied."""
    for layer in range(SMALL.layers):
        save.layer(layer)
        run = save._copying[0][1]
        assert run is not None
        assert run.wait(60.0)
    assert not save.done()


@pytest.mark.parametrize("mode", WRITE_MODES)
def test_layers_of_a_save_are_read_on_another_node_before_its_commit(tmp_path: Path, mode: str) -> None:
    options = {f"owner__{name.replace('.', '__')}": value for name, value in WRITE_MODES[mode].items()}
    with two_daemons(tmp_path, **options) as (owner, here), owner.connect() as there, here.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        half = there.keys(tokens_of(1, CHUNKS // 2 * SMALL.chunk_tokens))
        assert store(there, half).stored == len(half)
        with there.save(keys, from_=payload_of(keys, SMALL, len(half)), first_chunk=len(half)) as save:
            announce_all_but_the_last(save)
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the save has been reported")
            assert there.lookup(keys).chunks == len(half), "nobody finds the chunks before they are stored"
            with pool.acquire(pool.lookup(keys)) as lease:
                assert set(lease.tiers) == {Level.PEER}
                into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
                load = pool.load(lease, into=into)
                assert load.wait_layer(LAST - 1, 60.0)
                assert load.chunks_so_far == CHUNKS
                assert not load.wait_layer(LAST, 0.2) or load.chunks_so_far == len(half), (
                    "the last layer lands with the commit"
                )
                load.cancel()
                result = save.commit()
                assert result is not None
                assert result.stored == CHUNKS - len(half)
                again = pool.load(lease, into=into)
                assert again.wait().reason == "complete"
                assert_right_bytes(keys, SMALL, again.wait(), into)
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")


def test_a_save_that_is_given_up_is_a_miss_on_the_other_node(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), here.connect() as pool:
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        with here.connect() as reader, owner.connect() as there:
            save = there.save(keys, from_=payload_of(keys, SMALL))
            announce_all_but_the_last(save)
            wait_until(lambda: reader.lookup(keys).chunks == CHUNKS, "the save has been reported")
            with reader.acquire(reader.lookup(keys)) as lease:
                assert lease.chunks == CHUNKS
                load = reader.load(lease, into=np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8))
                assert load.wait_layer(0, 60.0)
                save.abort()
                assert load.wait().chunks == 0
            wait_until(lambda: reader.lookup(keys).chunks == 0, "the hint has gone")
            assert here.stats()["dram.chunks"] == 0


def test_layers_of_a_prompt_beyond_one_save_are_reported_of_the_groups_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its windows and states are all behind what one request can name."""
    monkeypatch.setattr(m, "KEYS_MAX", CHUNKS - 4)
    with two_daemons(tmp_path) as (owner, _), owner.connect(HYBRID) as there:
        keys = there.keys(tokens_of(1, CHUNKS * HYBRID.chunk_tokens))
        with begin(there, keys, [CHUNKS]) as save:
            save.layer(0, group=FULL)
            wait_until(lambda: save._copying[0][1].copied_extents() == 1, "the layer is copied")
            save.layer(1, group=FULL)  # reports the first one
            result = save.commit()
        assert [of_group.stored for of_group in result.groups] == [CHUNKS - 4, 0, 0]
        assert there.stats()["reconnects"] == 0


@pytest.mark.slow
def test_saves_that_take_long_delay_no_other_pull_and_are_no_fault_of_their_node(tmp_path: Path) -> None:
    with (
        two_daemons(tmp_path, here__peer__pull_timeout="3s") as (owner, here),
        owner.connect() as there,
        here.connect(timeout_s=20.0) as pool,
    ):
        stored, later = (pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens)) for seed in (90, 91))
        chains = [pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens)) for seed in range(4)]
        for keys in (stored, later):
            assert store(there, keys).stored == CHUNKS
        saves = [there.save(keys, from_=payload_of(keys, SMALL)) for keys in chains]
        for save in saves:
            announce_all_but_the_last(save)
        for keys in (*chains, stored, later):
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "it has been reported")  # noqa: B023 - used at once
        leases = [pool.acquire(pool.lookup(keys)) for keys in chains]
        assert load_all(pool, stored)[0].chunks == CHUNKS
        assert here.stats()["peer.pulls_under_way"] >= 1, "it came beside them"
        wait_until(lambda: here.stats()["peer.pulls_under_way"] == 0, "their time is over")
        assert here.stats()["peer.suspended_nodes"] == 0
        assert load_all(pool, later)[0].chunks == CHUNKS
        for save in saves:
            assert save.commit().stored == CHUNKS
        for lease in leases:
            lease.release()
        for daemon in (owner, here):
            assert daemon.problems() == []
