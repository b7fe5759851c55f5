"""Tests of chunks between hosts: three nodes, cables that are pulled out, lives that end, and who is not let in."""

from pathlib import Path

import pytest

from kvpool.states import Level
from tests.rigs.daemon import wait_until
from tests.rigs.nodes.network import ANSWER_S, STALL_S, chain_of, ends_within, load, network, wait_known
from tests.rigs.nodes.two_nodes import assert_converged
from tests.rigs.payload import store

pytestmark = pytest.mark.campaign

CHUNKS = 24


def test_three_nodes_have_what_one_of_them_has_stored(tmp_path: Path) -> None:
    with (
        network(tmp_path, ("one", "two", "three")) as net,
        net["one"].daemon() as one,
        net["two"].daemon() as two,
        net["three"].daemon() as three,
        one.connect() as first,
        two.connect() as second,
        three.connect() as third,
    ):
        keys = chain_of(first, 1, CHUNKS)
        assert store(first, keys).stored == CHUNKS
        for pool, daemon in ((second, two), (third, three)):
            wait_known(pool, keys, CHUNKS)
            assert set(pool.lookup(keys).tiers) == {Level.PEER}
            assert load(pool, keys).reason == "complete"
            assert daemon.stats()["peer.pulled_chunks"] == CHUNKS
        one.kill()
        with three.admin() as admin:
            admin.flush(None, None, "")
        # What the first has had, the second has now.
        wait_until(lambda: load(third, keys).reason == "complete", "the other owner is asked")
        for daemon in (two, three):
            wait_until(lambda: daemon.stats()["leases"] == 0, "no lease is left")  # noqa: B023 - used at once
            assert daemon.problems() == []


def test_a_partition_is_a_miss_by_its_deadline_and_heals(tmp_path: Path) -> None:
    with (
        network(tmp_path, ("owner", "here")) as net,
        net["owner"].daemon() as owner,
        net["here"].daemon() as here,
        owner.connect() as there,
        here.connect(timeout_s=30.0) as pool,
    ):
        known, later = chain_of(pool, 1, CHUNKS), chain_of(pool, 2, CHUNKS)
        store(there, known)
        wait_known(pool, known, CHUNKS)
        here.host.unplug(owner.host.address)
        with ends_within(ANSWER_S, "peer.answer_timeout"):
            assert load(pool, known).chunks == 0
        store(there, later)
        here.host.plug(owner.host.address)
        wait_known(pool, later, CHUNKS)
        wait_until(lambda: load(pool, later).reason == "complete", "the link has come again")
        assert load(pool, known).reason == "complete"
        assert here.problems() == owner.problems() == []
        assert_converged(here, owner)


def test_a_half_open_connection_is_found_and_the_next_life_is_not_taken_for_the_former(tmp_path: Path) -> None:
    with (
        network(tmp_path, ("owner", "here")) as net,
        net["owner"].daemon() as owner,
        net["here"].daemon() as here,
        here.connect(timeout_s=30.0) as pool,
    ):
        former, other = chain_of(pool, 1, CHUNKS), chain_of(pool, 2, CHUNKS)
        with owner.connect() as there:
            store(there, former)
            wait_known(pool, former, CHUNKS)
        here.host.unplug(owner.host.address)
        owner.kill()  # nobody is notified of the end of its connections
        owner.start()
        with owner.connect() as there:
            store(there, other)
        here.host.plug(owner.host.address)
        with ends_within(ANSWER_S, "peer.answer_timeout"):
            assert load(pool, former).chunks == 0
        wait_known(pool, former, 0)
        wait_known(pool, other, CHUNKS)
        wait_until(lambda: load(pool, other).reason == "complete", "the next life is asked")
        assert here.stats()["peer.links.new_lives"] == 1
        assert here.problems() == owner.problems() == []


def test_a_cable_that_is_pulled_out_in_the_middle_ends_the_pull(tmp_path: Path) -> None:
    with (
        network(tmp_path, ("owner", "here")) as net,
        net["owner"].daemon(peer__rate="64KiB") as owner,
        net["here"].daemon() as here,
        owner.connect() as there,
        here.connect(timeout_s=30.0) as pool,
    ):
        keys = chain_of(pool, 1, CHUNKS)
        store(there, keys)
        wait_known(pool, keys, CHUNKS)
        with pool.acquire(pool.lookup(keys)) as lease:
            assert lease.chunks == CHUNKS
            wait_until(lambda: owner.stats()["peer.offers.sent_bytes"] > 0, "bytes have been sent")
            here.host.unplug(owner.host.address)
            with ends_within(STALL_S, "peer.stall_timeout"):
                wait_until(lambda: here.stats()["peer.pulls_under_way"] == 0, "the pull has ended")
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended too")
        assert load(pool, keys).chunks < CHUNKS
        assert here.problems() == owner.problems() == []


def test_a_node_whose_key_is_not_allowed_neither_asks_nor_is_asked(tmp_path: Path) -> None:
    with (
        network(tmp_path, ("owner", "stranger"), allowed=("owner",)) as net,
        net["owner"].daemon() as owner,
        net["stranger"].daemon() as stranger,
        owner.connect() as there,
        stranger.connect() as pool,
    ):
        keys = chain_of(pool, 1, CHUNKS)
        store(there, keys)
        wait_until(lambda: stranger.stats()["peer.links.failed_handshakes"] > 1, "it was refused, and tried again")
        assert stranger.stats()["peer.links.ready"] == owner.stats()["peer.links.ready"] == 0
        assert owner.stats()["peer.asked.refused_handshakes"] > 0
        assert pool.lookup(keys).chunks == 0
        # Neither does it know a ticket: what it sends to the stream's port gets no thread and no byte.
        assert owner.stats()["peer.offers.sent_bytes"] == 0
