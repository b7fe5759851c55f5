"""The failpoint of a pull, crashed and delayed: a daemon that is about to pull from another node dies or is slow."""

from pathlib import Path

import numpy as np
import pytest

from tests.rigs.daemon import SMALL, wait_until
from tests.rigs.nodes.two_daemons import CHUNKS, load, two_daemons
from tests.rigs.payload import assert_right_bytes, store, tokens_of

POINT = "daemon.pull.before_read"


@pytest.mark.slow
@pytest.mark.parametrize("action", ["crash", "delay(200ms)"], ids=["crash", "delay"])
def test_a_failure_before_a_pull_costs_misses_and_nothing_else(tmp_path: Path, action: str) -> None:
    with two_daemons(tmp_path) as (owner, here), owner.connect() as there:
        keys = there.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
        assert store(there, keys).stored == CHUNKS
        here.kill()
        here.environment = {"KVPOOL_FAILPOINT": f"{POINT}:1:{action}"}
        here.start()
        with here.connect() as pool:
            wait_until(lambda: pool.lookup(keys).chunks == CHUNKS, "the hint has come")
            into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
            lease = pool.acquire(pool.lookup(keys))
            result = pool.load(lease, into=into[: lease.chunks]).wait()
            assert_right_bytes(keys, SMALL, result, into)
            assert result.chunks == (0 if action == "crash" else CHUNKS)
        assert f"failpoint {POINT} reached" in here.log()
        if action == "crash":
            assert here.process is not None
            assert here.process.wait(20.0) != 0
            here.environment = {}
            here.start()
            with here.connect() as pool:
                wait_until(lambda: load(pool, keys, CHUNKS).chunks == CHUNKS, "the next life pulls")
        wait_until(lambda: owner.stats()["leases"] == 0, "the owner's lease has ended")
