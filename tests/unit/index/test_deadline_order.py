"""The order of deadlines: expired entries are found though others, used before, last longer."""

import random

from kvpool.ids import ConnectionId, HoldId
from kvpool.index.deadline_order import DeadlineOrder
from kvpool.index.leases import Leases


def test_it_agrees_with_a_plain_dict(seed: int) -> None:
    chance = random.Random(seed)
    order: DeadlineOrder[int] = DeadlineOrder()
    deadlines: dict[int, int] = {}
    for now_ns in range(2000):
        key = chance.randrange(50)
        if key in deadlines and chance.random() < 0.3:
            order.remove(key)
            del deadlines[key]
        else:
            ttl_ns = chance.choice((5, 40, 300))
            order.use(key, ttl_ns, now_ns)
            deadlines[key] = now_ns + ttl_ns
        over = order.next_over(now_ns)
        assert (over is None) == all(deadline > now_ns for deadline in deadlines.values())
        assert over is None or deadlines[over] <= now_ns
        assert order.verify() == []
        assert len(order) == len(deadlines)


def test_a_shorter_time_to_live_applies_to_leases_but_not_below_the_promised_time() -> None:
    leases = Leases(ttl_ns=1000)
    promised = leases.grant(ConnectionId(1), 1, {0: [HoldId(1)]}, 0, least_ttl_ns=1000)
    leases.change_ttl(10)
    leases.grant(ConnectionId(2), 1, {0: [HoldId(2)]}, 0, least_ttl_ns=10)
    assert leases.expire(9) == []
    assert leases.expire(10) == [2], "it does not wait for the longer one"
    assert leases.renew(promised.id, ConnectionId(1), 500)
    assert leases.expire(1499) == []
    assert leases.expire(1500) == [1]
    assert leases.verify() == []


def test_a_longer_time_to_live_counts_from_the_next_use_on() -> None:
    leases = Leases(ttl_ns=10)
    lease = leases.grant(ConnectionId(1), 1, {0: [HoldId(1)]}, 0, least_ttl_ns=10)
    leases.change_ttl(1000)
    assert leases.renew(lease.id, ConnectionId(1), 5)
    assert leases.expire(1004) == []
    assert leases.expire(1005) == [1]
    assert leases.verify() == []
