"""A writer that is stopped in the middle of a copy while its daemon ends: nobody gets its slots before it writes no more."""

import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults.rigs.batches import batches
from tests.faults.rigs.kept.former_life import withheld_slots
from tests.faults.rigs.kept.prompts import CHAIN, HUGE
from tests.faults.rigs.tiered import let_pass
from tests.rigs.daemon import Daemon, freeze, spawn, wait_until
from tests.rigs.kept_daemon import KeptDaemon
from tests.rigs.payload import chunk_bytes_of, load_all, store, tokens_of

MODEL = {"model": "writers", "revision": "1"}
# Room for what the writer has and for as much of others'.
CAPACITY = f"{2 * CHAIN * HUGE.chunk_bytes}B"
WORK_S_MAX = 0.1
# Of the daemon's ends; the others are stops.
KILLED = 0.5
# Copies chains one after another and commits none, in one life of the daemon; then it waits for a line.
WRITER = """
import sys, numpy as np, kvpool_client as kv
from tests.faults.rigs.kept.former_life import withheld_slots
from tests.faults.rigs.kept.prompts import CHAIN, HUGE
pool = kv.connect(sys.argv[1], model="writers", revision="1", layout=HUGE, timeout_s=20.0)
noise = np.full((CHAIN, HUGE.chunk_bytes), 0x5A, np.uint8)
number = 0
for line in sys.stdin:
    while not pool.connected:
        pass
    epoch = pool.epoch
    print("writes", flush=True)
    while pool.epoch == epoch:
        number = (number + 1) % 2000  # token ids have 32 bits
        keys = pool.keys(np.arange(CHAIN * HUGE.chunk_tokens) + 1_000_000 * number)
        with pool.save(keys, from_=noise) as save:
            for layer in range(HUGE.layers):
                save.layer(layer)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_ended", [False, True], ids=["goes on", "ends"])
@pytest.mark.parametrize("kills", [pytest.param(3, id="some"), *batches(20, of=100)])
def test_a_stopped_writer_of_a_former_life_writes_to_nobodys_chunk(
    tmp_path: Path, seed: int, summary: Callable[[str], None], kills: int, is_ended: bool
) -> None:
    dice = random.Random(seed)
    withheld = 0
    options = {"dram.capacity": CAPACITY, "server.stop": "keep", "server.stop_timeout": "0s"}
    with KeptDaemon(tmp_path, **options) as daemon:
        for number in range(0, kills, 1 if is_ended else kills):
            with spawn(WRITER, daemon.socket) as writer:
                for again in range(1 if is_ended else kills):
                    _write(writer)
                    let_pass(dice.uniform(0.0, WORK_S_MAX))
                    end = daemon.kill if dice.random() < KILLED else daemon.stop
                    withheld += _outlive(daemon, end, writer, number + again, is_ended=is_ended)
    summary(f"{kills} ends, {withheld} slots withheld after them")
    assert withheld > 0, "a writer was stopped while it wrote"


def _write(writer: "subprocess.Popen[str]") -> None:
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "writes\n"


def _outlive(
    daemon: Daemon, end: Callable[[], object], writer: "subprocess.Popen[str]", number: int, *, is_ended: bool
) -> int:
    """Stop the writer, end the daemon, fill DRAM, have the writer go on or end; how many slots were withheld from others."""
    freeze(writer)
    end()
    daemon.start()
    withheld = withheld_slots(daemon)
    with daemon.connect(layout=HUGE, **MODEL) as pool:
        keys = pool.keys(tokens_of(number, 2 * CHAIN * HUGE.chunk_tokens))
        stored = store(pool, keys).stored
        assert stored == 2 * CHAIN - withheld, "each slot is somebody's"
        writer.send_signal(signal.SIGKILL if is_ended else signal.SIGCONT)
        wait_until(lambda: not withheld_slots(daemon), "the writer is known to have stopped")
        result, into = load_all(pool, keys)
        assert result.chunks == stored
        for chunk in range(stored):
            assert np.array_equal(into[chunk], chunk_bytes_of(keys[chunk], HUGE.chunk_bytes)), f"chunk {chunk}"
        if withheld:  # else it goes on with a save of its own
            assert store(pool, keys).stored == withheld, "what was withheld is anybody's"
        assert daemon.problems() == []
        with daemon.admin() as admin:
            admin.flush(None, None)
    return withheld
