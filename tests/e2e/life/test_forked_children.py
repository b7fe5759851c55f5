"""Loads and saves under way when their process forks: ended at once in the child, unharmed in the parent."""

from collections.abc import Callable

from tests.rigs.daemon import Daemon, in_both_write_modes, spawn

# Prints the child's report and exit status, then the parent's own result. The alarm ends a child that waits. The second commit
# goes on in the background: it waits there, so that it is under way at the fork.
FORKED = """
import os, signal, sys, threading, warnings
os.environ["KVPOOL_FAILPOINT"] = "client.save.before_commit:2:delay(1s)"
import numpy as np
import kvpool_client as kv
from kvpool_client.verbs.save import publish_each
from tests.rigs.daemon import SMALL
from tests.rigs.payload import assert_right_bytes, payload_of, store, tokens_of
warnings.simplefilter("ignore", DeprecationWarning)
CHUNKS = 100

def forked(act):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        os.write(writer, repr(act()).encode())
        os._exit(0)
    os.close(writer)
    seen = os.read(reader, 65536).decode()
    print(os.waitpid(child, 0)[1], seen)

with kv.connect(sys.argv[1], model="m", layout=SMALL, timeout_s=60.0) as pool:
    keys = pool.keys(tokens_of(1, CHUNKS * SMALL.chunk_tokens))
    save = pool.save(keys, from_=payload_of(keys, SMALL))

    def in_child_of_save():
        save.layer(0)
        return save.commit().reasons, save.wait_pending(60.0), save.done()

    forked(in_child_of_save)
    print(save.commit().stored)
    lease = pool.acquire(pool.lookup(keys))
    into = np.zeros((CHUNKS, SMALL.chunk_bytes), np.uint8)
    load = pool.load(lease, into=into)

    def in_child_of_load():
        seen = load.wait_layer(SMALL.layers - 1), load.done(), load.chunks_so_far
        result = load.wait()
        load.cancel()
        lease.release()
        return seen, result.chunks, result.reason, pool.lookup(keys).chunks

    forked(in_child_of_load)
    result = load.wait()
    assert_right_bytes(keys, SMALL, result, into)
    print(result.chunks, result.reason)
    lease.release()
    begun = pool.save(pool.keys(tokens_of(2, CHUNKS * SMALL.chunk_tokens)), from_=payload_of(keys, SMALL))
    begun.commit(wait=False)
    forked(lambda: (begun.wait().stored, begun.abort()))
    print(begun.wait().stored)
    together = pool.save(pool.keys(tokens_of(3, SMALL.chunk_tokens)), from_=payload_of(keys, SMALL)[:1])
    forked(lambda: [result.reasons for result in publish_each([together])])
    print(publish_each([together])[0].stored)
"""


@in_both_write_modes
def test_loads_and_saves_under_way_at_a_fork_end_in_the_child_and_go_on_in_the_parent(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    with spawn(FORKED, daemon.socket) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert lines == [
        "0 ({'disconnected': 100}, True, True)",
        "100",
        "0 ((False, True, 0), 0, 'disconnected', 0)",
        "100 complete",
        "0 (0, None)",
        "100",
        "0 [{'disconnected': 1}]",
        "1",
    ]
    assert daemon.problems() == []
