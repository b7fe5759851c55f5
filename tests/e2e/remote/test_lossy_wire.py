"""Two daemons with an RDMA device each, and a wire between them that loses packets: what comes is right, and all ends in time.

Only in a machine with rxe0 and rxe1 at the ends of a wire of their own (`make test-rdma`): the kernel's netem loses packets of
RDMA there and no others, for the control plane takes the loopback.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.daemon import SMALL
from tests.rigs.payload import store, tokens_of
from tests.rigs.transfer.engine_daemons import PROTOCOL, connected, engine_daemons, load, needs_engine, until

# The device at each end, and how many of its packets are lost, in percent.
WIRES = {"wire0": "rxe0", "wire1": "rxe1"}
LOSS_PERCENT = 20
CHUNKS = 40
PULL_S = 20.0
ENDS_S = PULL_S + 5.0


def _missing() -> str:
    if PROTOCOL != "rdma":
        return "KVPOOL_RDMA_PROTOCOL is not rdma: make test-rdma"
    if shutil.which("tc") is None:
        return "iproute2 (tc) is not installed"
    found = [wire for wire in WIRES if not Path(f"/sys/class/net/{wire}").exists()]
    return f"no network device {found[0]}: make test-rdma" if found else ""


REASON = _missing()
pytestmark = [needs_engine, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]


@contextmanager
def lossy() -> Iterator[None]:
    """Both directions lose packets."""
    for wire in WIRES:
        _tc("replace", "dev", wire, "root", "netem", "loss", f"{LOSS_PERCENT}%", "limit", "10000")
    try:
        yield
    finally:
        for wire in WIRES:
            _tc("del", "dev", wire, "root")


def lost() -> int:
    """Packets that the wires have lost."""
    return sum(int(one.get("drops", 0)) for wire in WIRES for one in json.loads(_tc("show", "dev", wire)))


def _tc(verb: str, *arguments: str) -> str:
    command = ["tc", "-j", "-s", "qdisc", verb, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def test_heavy_loss_delays_chunks_and_changes_none(tmp_path: Path) -> None:
    options = {
        "owner__peer__rdma_devices": WIRES["wire1"],
        "here__peer__rdma_devices": WIRES["wire0"],
        "here__peer__pull_timeout": f"{PULL_S:g}s",
        "here__peer__stall_timeout": f"{PULL_S / 2:g}s",
    }
    with engine_daemons(tmp_path, **options) as (owner, here), owner.connect() as there, here.connect() as pool:
        connected(owner, here)
        chains = [pool.keys(tokens_of(seed, CHUNKS * SMALL.chunk_tokens)) for seed in (1, 2, 3)]
        for keys in chains:
            assert store(there, keys).stored == CHUNKS
        until(lambda: all(pool.lookup(keys).chunks == CHUNKS for keys in chains), "the hints have come")
        assert load(pool, chains[0], SMALL).chunks == CHUNKS
        pulls = here.stats()["peer.rdma.pulls"]
        with lossy():
            began_s = time.monotonic()
            load(pool, chains[1], SMALL)  # a part or all of it: each byte is compared
            until(lambda: here.stats()["peer.pulls_under_way"] == 0, "the pull has ended")
            assert time.monotonic() - began_s < ENDS_S
            assert here.stats()["peer.rdma.pulls"] > pulls
            assert lost() > 0
            load(pool, chains[1], SMALL)  # what has come since
        until(lambda: load(pool, chains[2], SMALL).chunks == CHUNKS, "a good wire brings all of it")
        until(lambda: here.stats()["peer.rdma.quarantined_bytes"] == 0, "the late reads have ended", 60.0)
