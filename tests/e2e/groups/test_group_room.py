"""Leases of groups from disk in a DRAM that has room for few of them: they are served one after the other."""

import threading
from collections.abc import Callable
from pathlib import Path

import kvpool_client as kv
from kvpool.clock import Deadline
from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.groups.hybrid import load, store
from tests.rigs.payload import tokens_of

CHUNKS, WINDOW, PROMPTS, ROUNDS = 60, 40, 8, 10
SHAPE = {"head_dim": 16, "dtype": "float16", "layers": 2}
LAYOUT = kv.Layout(
    chunk_tokens=32,
    groups=(
        kv.Group(kv_heads=2, **SHAPE),  # type: ignore[arg-type]
        kv.Group(kind="window", window=32 * WINDOW, kv_heads=1, **SHAPE),  # type: ignore[arg-type]
        kv.Group(kind="state", layers=1, state_bytes=32 * 24),
    ),
)


def test_leases_that_wait_for_room_at_once_are_all_served(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Each needs a third of DRAM: were they to keep what they have while they wait, hardly any of them would get all of it."""
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__capacity": "64MiB", "ssd__watermark": "1"}
    daemon = start_daemon(dram__capacity="8MiB", **ssd)
    with daemon.connect(LAYOUT) as pool, daemon.admin() as admin:
        for number in range(PROMPTS):
            assert store(pool, pool.keys(tokens_of(number, CHUNKS * 32 + 1)), [CHUNKS]).declined == 0
        admin.demote_all(20.0)
    daemon.stop()
    daemon = start_daemon(dram__capacity="1600KiB", **ssd)
    wait_until(lambda: daemon.stats()["ssd.state"] == "ok", "the tier is open")
    served = [0] * PROMPTS
    deadline = Deadline(40.0)

    def ask(number: int) -> None:
        with daemon.connect(LAYOUT, timeout_s=10.0) as pool:
            keys = pool.keys(tokens_of(number, CHUNKS * 32 + 1))
            while served[number] < ROUNDS and not deadline.has_passed():
                with pool.acquire(pool.lookup(keys)) as lease:
                    if lease.chunks:
                        result, _ = load(pool, lease)
                        served[number] += result.chunks == CHUNKS

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(PROMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == [ROUNDS] * PROMPTS
    assert daemon.problems() == []
