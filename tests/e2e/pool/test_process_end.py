"""The end of an engine's process whose Pool is open and busy: it ends as the engine ends, with the engine's exit status."""

import pytest

from tests.rigs.daemon import Daemon, spawn, wait_until

ENGINE = """
import sys, threading
import numpy as np
import kvpool_client as kv

layout = kv.Layout(layers=4, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=64)
pool = kv.connect(sys.argv[1], model=sys.argv[2], layout=layout, timeout_s=20.0)
chunks = np.zeros((24, pool.layout.chunk_bytes), np.uint8)
keys = pool.keys(np.arange(24 * 64, dtype=np.int32) + int(sys.argv[3]))
save = pool.save(keys, from_=chunks)
if sys.argv[2] == "save":
    save.commit(wait=False)
else:
    saved = save.commit()
    assert saved.stored + saved.present == 24
    lease = pool.acquire(pool.lookup(keys))
    begun = threading.Event()

    def load():
        while pool.load(lease, into=chunks).wait().chunks == 24:
            begun.set()

    threading.Thread(target=load, daemon=True).start()
    assert begun.wait(20)
print("ended")
"""


@pytest.mark.parametrize("processes", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", ["save", "load"])
def test_an_engine_that_ends_while_a_thread_waits_for_copies_is_not_aborted(
    shared_daemon: Daemon, work: str, processes: int
) -> None:
    for number in range(processes):
        with spawn(ENGINE, shared_daemon.socket, work, str(number)) as engine:
            assert engine.stdout is not None
            printed = engine.stdout.read()
        assert (printed, engine.returncode) == ("ended\n", 0)


LOOKS_UP = """
import sys
import numpy as np
import kvpool_client as kv

layout = kv.Layout(layers=4, kv_heads=4, head_dim=64, dtype="float16", chunk_tokens=64)
pool = kv.connect(sys.argv[1], model="ends-without-close", layout=layout, timeout_s=20.0)
for number in range(3):
    pool.lookup(pool.keys(np.full(64, number, np.int32)))
print("ended")
"""


def test_what_an_engine_counted_in_its_last_second_is_reported_though_it_closes_nothing(shared_daemon: Daemon) -> None:
    with spawn(LOOKS_UP, shared_daemon.socket) as engine:
        assert engine.stdout is not None
        assert engine.stdout.read() == "ended\n"

    def looked_up() -> int:
        with shared_daemon.admin() as admin:
            (model,) = (one for one in admin.models()["models"] if one["model"] == "ends-without-close")
        return int(model["lookup_tokens"])

    wait_until(lambda: looked_up() == 3 * 64, "the last report has come")
