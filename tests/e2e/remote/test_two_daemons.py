"""Two daemons that are peers: what one has stored is a hit on the other, and whatever fails is a miss."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.config.curve_keys import make_key_pair, write_key_file
from kvpool.states import Level
from tests.rigs.daemon import SMALL, Daemon, wait_until
from tests.rigs.nodes.two_daemons import CHUNKS, load, two_daemons
from tests.rigs.payload import assert_right_bytes, payload_of, store, tokens_of


def known(there: kv.Pool, pool: kv.Pool, seed: int = 1) -> kv.KeyChain:
    """A chain that one node stores, and the other one knows."""
    keys = pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens))
    assert store(there, keys).stored == CHUNKS
    wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
    return keys


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """Two peers for all tests that leave both as they were."""
    with two_daemons(tmp_path_factory.mktemp("pair")) as daemons:
        yield daemons


def test_an_owner_that_was_killed_is_a_miss_and_its_next_life_has_nothing(tmp_path: Path) -> None:
    with two_daemons(tmp_path) as (owner, here), here.connect() as pool:
        with owner.connect() as there:
            keys = known(there, pool)
        owner.kill()
        assert load(pool, keys, CHUNKS).chunks == 0
        owner.start()
        wait_until(lambda: pool.lookup(keys).chunks == 0, "the former life's hints have gone")
        with owner.connect() as there:
            store(there, keys)
            wait_until(lambda: load(pool, keys, CHUNKS).chunks == CHUNKS, "the new life's chunks are hits")


def test_chunks_on_the_owners_disk_are_hits(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with two_daemons(tmp_path, owner__ssd__path=str(disk), owner__ssd__capacity="64MiB", owner__ssd__create="true") as (
        owner,
        here,
    ):
        wait_until(lambda: owner.stats()["ssd.state"] == "ok", "the tier is open")
        with owner.connect() as there, here.connect() as pool, owner.admin() as admin:
            keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
            store(there, keys)
            assert admin.demote_all(60.0)["left"] == 0
            admin.flush(None, None, "dram")
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
            assert load(pool, keys, CHUNKS).reason == "complete"


def test_streams_are_encrypted_where_both_nodes_are_configured_to(tmp_path: Path) -> None:
    pair = make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    common = {"peer__keys": str(tmp_path / "key"), "peer__allow": str(tmp_path / "allow"), "peer__encrypt": "true"}
    options = {f"{name}__{key}": value for name in ("owner", "here") for key, value in common.items()}
    with two_daemons(tmp_path, **options) as (owner, here), owner.connect() as there, here.connect() as pool:
        keys = known(there, pool)
        assert load(pool, keys, CHUNKS).reason == "complete"
        assert here.stats()["peer.pulled_chunks"] == CHUNKS
        assert owner.stats()["peer.offers.strangers_unencrypted"] == 0


@pytest.mark.parametrize(
    "is_allowed", [pytest.param(True, id="allowed", marks=pytest.mark.slow), pytest.param(False, id="another key")]
)
def test_only_nodes_with_allowed_keys_are_served(tmp_path: Path, is_allowed: bool) -> None:
    pair, stranger = make_key_pair(), make_key_pair()
    write_key_file(str(tmp_path / "key"), pair)
    write_key_file(str(tmp_path / "other"), stranger)
    (tmp_path / "allow").write_text(pair.public.decode() + "\n")
    keys = {
        "owner__peer__keys": str(tmp_path / "key"),
        "here__peer__keys": str(tmp_path / ("key" if is_allowed else "other")),
    }
    allow = {f"{name}__peer__allow": str(tmp_path / "allow") for name in ("owner", "here")}
    with (
        two_daemons(tmp_path, is_allowed, **keys, **allow) as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        chain = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        store(there, chain)
        if is_allowed:
            wait_until(lambda: pool.lookup(chain).chunks == CHUNKS, "the hint has come")
            assert load(pool, chain, CHUNKS).reason == "complete"
        else:
            wait_until(lambda: here.stats()["peer.links.failed_handshakes"] > 0, "the stranger was refused")
            assert here.stats()["peer.links.ready"] == 0
            assert pool.lookup(chain).chunks == 0


@pytest.mark.slow
def test_the_measured_pace_of_a_node_is_what_a_lease_says_it_costs(tmp_path: Path) -> None:
    """The owner sends 256 KiB in a second: loading from it is estimated to take long once that is known."""
    with (
        two_daemons(tmp_path, owner__peer__rate="256KiB") as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        first, later = (known(there, pool, number) for number in (1, 2))
        hit = pool.lookup(first)
        assert hit.peer_pace is None
        with pool.acquire(hit) as lease:
            assert lease.cost_s < 0.1, "a guess"
            into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
            assert pool.load(lease, into=into).wait().reason == "complete"
        wait_until(lambda: pool.lookup(later).peer_pace is not None, "it was measured")
        hit = pool.lookup(later)
        assert hit.peer_pace is not None
        assert hit.peer_pace.bytes_per_s < 10e6
        with pool.acquire(hit) as lease:
            assert lease.cost_s > hit.peer_pace.cost_s(CHUNKS * SMALL.chunk_bytes) > 0.05
        assert pool.lookup(first).peer_pace is None, "these chunks are here"


def test_a_node_that_is_named_is_asked_at_once_and_an_unknown_one_is_a_miss(pair: tuple[Daemon, Daemon]) -> None:
    owner, here = pair
    with owner.connect() as there, here.connect() as pool:
        wait_until(lambda: here.stats()["peer.links.ready"] == 1, "the nodes are connected")
        keys, others = (pool.keys(tokens_of(number, CHUNKS * SMALL.chunk_tokens)) for number in (21, 22))
        store(there, keys)
        hit = pool.lookup(keys, owner="owner")
        assert (hit.chunks, hit.chunks_here) == (CHUNKS, 0)
        assert set(hit.tiers) == {Level.PEER}
        with pool.acquire(hit) as lease:
            into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
            result = pool.load(lease, into=into).wait()
            assert (result.reason, result.chunks) == ("complete", CHUNKS)
            assert_right_bytes(keys, SMALL, result, into)
        assert pool.lookup(keys, owner="owner").owner == "", "they are here"
        with pool.acquire(pool.lookup(others, owner="nobody")) as lease:
            assert lease.chunks == 0
        with pool.acquire(pool.lookup(others, owner="owner")) as lease:
            assert pool.load(lease, into=np.zeros((lease.chunks, SMALL.chunk_bytes), np.uint8)).wait().chunks == 0
        with pytest.raises(kv.InvalidArgument, match="owner is"):
            pool.lookup(keys, owner="x" * 257)


@pytest.mark.slow
@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "its owner dies"])
def test_a_save_of_what_is_on_its_way_is_answered_for_what_is_certain(tmp_path: Path, comes: bool) -> None:
    """The owner sends 128 KiB in a second."""
    with (
        two_daemons(tmp_path, owner__peer__rate="128KiB") as (owner, here),
        owner.connect() as there,
        here.connect() as pool,
    ):
        keys = known(there, pool)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS
            save = pool.save(keys, from_=payload_of(keys, SMALL))
            result = save.commit()
            assert result.reasons == {"pending": CHUNKS}
            assert not save.wait_pending(0.01)
            assert save.has_pending()
            if not comes:
                owner.kill()
            assert save.wait_pending(20.0) is comes
        again = store(pool, keys)
        assert again.stored + again.present == CHUNKS
        assert (again.present == CHUNKS) is comes
        assert load(pool, keys, CHUNKS).reason == "complete"
