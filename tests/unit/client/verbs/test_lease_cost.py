"""Cost of a lease: what comes from elsewhere counts with the bytes of its own group."""

import pytest

import kvpool_client as kv
from kvpool.protocol.records import messages as m
from kvpool_client.connection.peer_pace import PeerPace
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.lease import Lease, LeaseHold
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import FULL, HYBRID, STATE, WINDOW

DRAM, PEER, STORE = (bytes([level]) for level in (kv.Level.DRAM, kv.Level.PEER, kv.Level.STORE))
FULL_BYTES, WINDOW_BYTES, STATE_BYTES = (HYBRID.of_group(group).stored_bytes for group in (FULL, WINDOW, STATE))


@pytest.mark.parametrize(
    ("layout", "levels", "size"),
    [
        (SMALL, DRAM * 2 + PEER + STORE, 2 * SMALL.stored_bytes),
        (HYBRID, DRAM * 3 + PEER + DRAM * 2 + PEER, FULL_BYTES + STATE_BYTES),
        (HYBRID, PEER * 4 + DRAM + STORE + DRAM, 4 * FULL_BYTES + WINDOW_BYTES),
        (HYBRID, DRAM * 7, 0),
    ],
)
def test_what_comes_from_elsewhere_costs_by_the_bytes_of_its_group(layout: kv.Layout, levels: bytes, size: int) -> None:
    leased = m.Leased(lease=1, chunks=4, offsets=b"", generations=b"", tiers=levels)
    hold = LeaseHold(None, leased, namespace=Namespace("model", layout, ""), asked_ns=0)
    lease = Lease(hold, estimate_s=lambda chunks: 100.0 * chunks, peer_pace=PeerPace(bytes_per_s=1.0, wait_s=0.0))
    assert lease.cost_s == 400.0 + size
