"""Tickets: a scheduler leases for all ranks, each of which claims its own once."""

from dataclasses import replace

import pytest

import kvpool_client as kv
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import in_both_write_modes, wait_until
from tests.rigs.layouts import over
from tests.rigs.prompts import CHUNKS, Ranks, assert_loads, prompt, store


@over()
def test_a_ticket_is_claimed_by_each_rank_of_one_namespace_and_holds_its_chunks_until_then(
    ranks: Ranks, shared: Shared
) -> None:
    keys = ranks.prompt(1)
    ranks.store(keys)
    with shared.connect(ranks.layout) as scheduler, shared.connect(model="stranger") as stranger:
        with scheduler.acquire(scheduler.lookup(keys)) as lease:
            ticket, single = lease.ticket(claims=len(ranks.pools)), lease.ticket()
            for wrong in (0, -1, 1025, True, 1.0):
                with pytest.raises(kv.InvalidArgument, match="claims is"):
                    lease.ticket(claims=wrong)  # type: ignore[arg-type]
        for foreign in (ticket, b"forged" * 5):
            assert stranger.claim(foreign).chunks == 0
        with shared.daemon.admin() as operator:
            assert operator.flush(shared.model, None)["skipped"] == ranks.needed(keys)
        for pool in ranks.pools:
            with pool.claim(ticket) as claimed:
                assert claimed.chunks == CHUNKS
                assert_loads(pool, keys, claimed)
        assert ranks.first.claim(ticket).chunks == 0
        with ranks.first.claim(single) as claimed:
            assert [pool.claim(single).chunks for pool in ranks.pools] == [0] * len(ranks.pools)
            assert claimed.chunks == CHUNKS
    stats = shared.daemon.stats
    wait_until(lambda: stats()["leases"] == stats()["tickets"] == 0, "nothing is held")


@in_both_write_modes
@over("plain", "hybrid")
def test_a_scheduler_sees_the_minimum_over_ranks_and_hands_tickets(ranks: Ranks, shared: Shared) -> None:
    with shared.connect(replace(ranks.layout, world=2, rank=None)) as scheduler:
        keys = prompt(scheduler, 15)
        workers = [shared.connect(replace(ranks.layout, world=2, rank=rank)) for rank in (0, 1)]
        store(workers[0], prompt(workers[0], 15), [3, CHUNKS])
        assert scheduler.lookup(keys).chunks == 0
        store(workers[1], prompt(workers[1], 15), [3], chunks=3)
        hit = scheduler.lookup(keys)
        assert hit.chunks == 3
        lease = scheduler.acquire(hit)  # a ticket outlives the connection of its lease
        ticket = lease.ticket()
    for worker in workers:
        with worker.claim(ticket) as claimed:
            assert claimed.chunks == 3
            assert_loads(worker, prompt(worker, 15), claimed)
            assert worker.claim(ticket).chunks == 0
        worker.close()
    wait_until(lambda: shared.daemon.stats()["leases"] == 0, "no lease is left")
