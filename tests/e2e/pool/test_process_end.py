"""The end of an engine's process whose Pool is open: what it has counted is reported all the same."""

from tests.rigs.daemon import Daemon, spawn, wait_until

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
