"""Pullers: the bounds of a peer are those of a key, or where a fleet shares one pair those of each node."""

from kvpool.clock import MonotonicClock
from kvpool.peers.control.pullers import NODES_PER_KEY, Pullers

SHARED, OWN = "aa" * 32, "bb" * 32


def make_pullers() -> Pullers:
    return Pullers(MonotonicClock(), connections_max=1000, per_peer_max=4, idle_s=60.0, shared_key=SHARED)


def greet(pullers: Pullers, number: int, node: str, key: str) -> tuple[str, int]:
    """A Hello: the peer that it counts for, and how many connections it ends."""
    route = number.to_bytes(4, "little")
    peer = pullers.peer_of(key, node=node, key=key)
    ended = pullers.replaced_by(route, peer, node=node, key=key)
    for former in ended:
        pullers.forget(former)
    pullers.add_connection(
        route, peer, node=node, incarnation=bytes(16), key=key, number=len(pullers) + number * 1000, sequence=1
    )
    return peer, len(ended)


def test_the_nodes_of_a_fleet_with_one_key_do_not_end_each_others_connections() -> None:
    pullers = make_pullers()
    peers = [greet(pullers, number, f"node-{number}", SHARED) for number in range(20)]
    assert [ended for _, ended in peers] == [0] * 20
    assert len({peer for peer, _ in peers}) == len(pullers) == 20


def test_a_key_of_its_own_is_one_peer_whatever_names_it_shows() -> None:
    pullers = make_pullers()
    peers = [greet(pullers, number, f"node-{number}", OWN) for number in range(20)]
    assert {peer for peer, _ in peers} == {OWN}
    assert len(pullers) == 4


def test_names_beyond_the_bound_of_a_shared_key_are_one_peer() -> None:
    pullers = make_pullers()
    for number in range(2 * NODES_PER_KEY):
        greet(pullers, number, f"node-{number}", SHARED)
    assert len(pullers) == NODES_PER_KEY + 4
    peer, _ = greet(pullers, 0, "node-0", SHARED)
    assert peer == f"{SHARED}/node-0", "it is known already"
