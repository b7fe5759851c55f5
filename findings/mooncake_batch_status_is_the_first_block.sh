#!/bin/sh
# Mooncake's transfer_check_status says of a batch what it knows of the batch's first block: 1, completed, for blocks that never come.
#
#   findings/mooncake_batch_status_is_the_first_block.sh   needs Debian 12 with python3 and its venv module; installs into a temporary
#                                                          folder (47 MB of downloads)
#
# batch_transfer_async_read gives one id for many blocks, and the library's documentation names transfer_check_status, the only call that
# does not block, as one of two ways to follow it. It asks for the first task of the batch alone, and an id that was answered with 1 is
# freed: nothing can be asked any more. A reader that hands its buffer on at 1 computes with what the buffer held before
#   - while the other blocks are under way: they land later, in memory that has another owner by then;
#   - for ever, where a later block was refused (here: the owner has taken back that one's memory): of this the caller learns nothing,
#     the log has a line. With the refused block in front the same batch is -1, failed, though the other one did arrive.
# The blocking get_batch_transfer_status answers for all blocks (-1). With a batch for each block transfer_check_status is right.
#
# Seen, CPython 3.11, mooncake-transfer-engine-non-cuda 0.3.13.post1, over TCP on loopback; blocks of 64 KiB and 256 MiB, three times each;
# the last bytes of both blocks, 7 is what the owner has and 0 what the reader's memory held:
#   small, big: status 1 with 7 0, in the end 7 7
#   big, small: status 1 with 7 7, in the end 7 7
#   small, refused: status 1, in the end 7 0
#   refused, small: status -1, in the end 0 7
#   small, refused: get_batch_transfer_status -1
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 >&2
(cd "$folder" && apt-get download -qq libibverbs1=44.0-2 libnl-3-200=3.7.0-0.2+b1 libnl-route-3-200=3.7.0-0.2+b1 libnuma1=2.0.16-1) >&2
for package in "$folder"/*.deb; do
  dpkg -x "$package" "$folder/root"
done

cat >"$folder/judge.py" <<'PYTHON'
import ctypes
import subprocess
import sys
import time

from mooncake.engine import TransferEngine

SMALL, BIG = 64 << 10, 256 << 20
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
sizes = [SMALL, BIG]
memory = [(ctypes.c_ubyte * size)() for size in sizes]
here = [ctypes.addressof(one) for one in memory]
for address, size in zip(here, sizes):
    assert engine.register_memory(address, size) == 0


def own():
    """The other side: has the bytes, and takes the second region back when told to."""
    for address, size in zip(here, sizes):
        ctypes.memset(address, 7, size)
    print("own", engine.get_rpc_port(), *here, flush=True)
    sys.stdin.readline()
    print("own", engine.unregister_memory(here[1]), flush=True)
    sys.stdin.readline()


def told(owner):
    while True:
        words = owner.stdout.readline().split()
        if words[:1] == ["own"]:
            return [int(word) for word in words[1:]]


def read(peer, there, order, lengths):
    """Reads the starts of both regions, in that order; the status, and the blocks' last bytes at once and in the end, in that order."""
    for address, size in zip(here, sizes):
        ctypes.memset(address, 0, size)
    batch = engine.batch_transfer_async_read(
        peer, [here[region] for region in order], [there[region] for region in order], [lengths[region] for region in order]
    )
    assert batch
    status = 0
    while status == 0:
        time.sleep(0.0002)
        status = engine.transfer_check_status(batch)
    at_once = [memory[region][lengths[region] - 1] for region in order]
    time.sleep(3)
    later = [memory[region][lengths[region] - 1] for region in order]
    return f"status {status}", "with {} {}".format(*at_once), "in the end {} {}".format(*later)


def judge():
    owner = subprocess.Popen([sys.executable, __file__, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=2, text=True)
    try:
        port, *there = told(owner)
        peer = f"127.0.0.1:{port}"
        read(peer, there, [0, 1], [SMALL, SMALL])  # connects
        for _ in range(3):
            for name, order in ("small, big:", [0, 1]), ("big, small:", [1, 0]):
                status, at_once, later = read(peer, there, order, [SMALL, BIG])
                print(name, f"{status} {at_once}, {later}")
        print("taken back", file=owner.stdin, flush=True)
        assert told(owner) == [0]
        for _ in range(3):
            for name, order in ("small, refused:", [0, 1]), ("refused, small:", [1, 0]):
                status, _, later = read(peer, there, order, [SMALL, SMALL])
                print(name, f"{status}, {later}")
        batch = engine.batch_transfer_async_read(peer, here, there, [SMALL, SMALL])
        print("small, refused: get_batch_transfer_status", engine.get_batch_transfer_status([batch]))
    finally:
        owner.kill()


if sys.argv[1:] == ["own"]:
    own()
else:
    judge()
PYTHON

cat >"$folder/expected" <<'TEXT'
big, small: status 1 with 7 7, in the end 7 7
refused, small: status -1, in the end 0 7
small, big: status 1 with 7 0, in the end 7 7
small, refused: get_batch_transfer_status -1
small, refused: status 1, in the end 7 0
TEXT
libraries=$folder/root/usr/lib/x86_64-linux-gnu:$folder/root/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$libraries MC_FORCE_TCP=1 "$folder/venv/bin/python" "$folder/judge.py" 2>"$folder/errors" | tee "$folder/seen"
LC_ALL=C sort -u "$folder/seen" >"$folder/once"
if [ "$(wc -l <"$folder/seen")" -ne 13 ] || ! diff -u "$folder/expected" "$folder/once"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
