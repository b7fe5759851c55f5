"""Two daemons with TransferEngine: what one has stored comes to the other by it, and whatever fails is a miss."""

from pathlib import Path

from kvpool.types import Level
from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.payload import store, tokens_of
from tests.rigs.transfer.engine_daemons import engine_daemons, load, needs_engine, serving

pytestmark = needs_engine
CHUNKS = 40


def test_what_one_has_stored_comes_by_transfer_engine(tmp_path: Path) -> None:
    with engine_daemons(tmp_path) as (owner, here), owner.connect() as there, here.connect() as pool:
        serving(owner, here)
        keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert store(there, keys).stored == CHUNKS
        wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
        assert set(pool.lookup(keys).tiers) == {Level.PEER}
        assert load(pool, keys, SMALL).reason == "complete"
        stats = here.stats()
        assert stats["peer.rdma.pulls"] == 1
        assert stats["peer.tcp.pulls"] == 0
        assert stats["peer.rdma.read_bytes"] == owner.stats()["peer.rdma.served_bytes"] == CHUNKS * SMALL.chunk_bytes
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")
