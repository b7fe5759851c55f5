"""Each kind of I/O of the SSD tier through a daemon: the same bytes, and `kvpoolctl info` names the kind in use."""

import sys
from pathlib import Path

import pytest

import kvpool_client as kv
from kvpool.states import Level
from tests.rigs.daemon import Daemon, Start, wait_connected
from tests.rigs.kvpoolctl import ctl_json
from tests.rigs.payload import assert_right_bytes, load_all, store, tokens_of

CHUNKS = 2
# Chunks of 2 MiB: much smaller ones use plain calls anyway.
LARGE = kv.Layout(layers=4, kv_heads=8, head_dim=64, dtype="float16", chunk_tokens=256)

# The kernel answers EPERM to io_uring_setup from now on, as a container's filter does; then the daemon's own command line.
REFUSED = """
import ctypes, runpy, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
IO_URING_SETUP, EPERM = 425, 1
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, IO_URING_SETUP), (0x06, 0, 0, 0x00050000 | EPERM), (0x06, 0, 0, 0x7FFF0000)]
filter = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(filter)))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
runpy.run_module("kvpool.cli.kvpoold", run_name="__main__")
"""


class RefusedDaemon(Daemon):
    """A daemon that the kernel gives no rings."""

    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-c", REFUSED, *super().command()[3:]]


def options(directory: Path, io: str) -> dict[str, str]:
    return {"ssd.path": str(directory / "ssd"), "ssd.capacity": "64MiB", "ssd.io": io, "dram.capacity": "16MiB"}


def ssd_io(daemon: Daemon) -> str:
    return str(daemon.info()["ssd_io"])


def save_and_load_from_disk(daemon: Daemon, *, restarts: bool = True) -> None:
    """Chunks are demoted, and promoted again, with `restarts` in the daemon's next life."""
    with daemon.connect(LARGE, timeout_s=20.0) as pool:
        keys = pool.keys(tokens_of(7, CHUNKS * LARGE.chunk_tokens))
        assert store(pool, keys).stored == CHUNKS
        assert ctl_json(daemon, "flush", "--all", "--demote", "--yes")["chunks"] == CHUNKS
        if restarts:
            daemon.kill()
            daemon.start()
            daemon.wait_open()
            wait_connected(pool)
        else:
            assert ctl_json(daemon, "flush", "--all", "--tier", "dram", "--yes")["chunks"] == CHUNKS
        assert pool.lookup(keys).tiers.tolist() == [Level.SSD] * CHUNKS
        result, into = load_all(pool, keys)
        assert (result.chunks, result.reason) == (CHUNKS, "complete")
        assert_right_bytes(keys, LARGE, result, into)
    stats = daemon.stats()
    assert stats["ssd.read_bytes"] > 0
    assert (stats["ssd.io_errors"], stats["ssd.corrupt_chunks"]) == (0, 0)
    assert daemon.problems() == []


@pytest.mark.parametrize("io", ["threads", "io_uring"])
def test_chunks_outlive_a_kill_with_each_kind_of_io(start_daemon: Start, tmp_path: Path, io: str) -> None:
    daemon = start_daemon(**{name.replace(".", "__"): value for name, value in options(tmp_path, io).items()})
    daemon.wait_open()
    words = ssd_io(daemon)
    if "no io_uring" in words:
        pytest.skip(f"the kernel or the build gives no rings: {words}")
    assert words.split(", ")[0] == io
    assert words.split(", ")[1] in ("direct", "page cache")
    save_and_load_from_disk(daemon)
    stats = daemon.stats()
    assert (stats["ssd.bad_writes"], stats["ssd.io_distrusted"]) == (0, 0)


@pytest.mark.parametrize(("io", "level"), [("io_uring", "WARNING"), ("auto", "INFO")])
def test_where_rings_are_refused_plain_calls_serve_and_the_log_reports_it(tmp_path: Path, io: str, level: str) -> None:
    with RefusedDaemon(tmp_path, **options(tmp_path, io)) as daemon:
        daemon.wait_open()
        words = ssd_io(daemon)
        assert words.startswith("threads, ")
        if "page cache" not in words or io == "io_uring":
            assert "no io_uring: " in words
            logged = [line for line in daemon.log().splitlines() if "does without io_uring" in line]
            assert logged, daemon.log()
            assert level in logged[0]
        save_and_load_from_disk(daemon, restarts=False)
        assert daemon.stop() == 0
