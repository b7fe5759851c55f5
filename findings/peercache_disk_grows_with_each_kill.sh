#!/bin/sh
# The disk tier of PeerCache (an L3 store for SGLang's HiCache) forgets its pages when the process is killed, and keeps their files for ever.
#
#   findings/peercache_disk_grows_with_each_kill.sh      needs python3 with its venv module; installs into a temporary folder
#
# Each page is a file that begins with its key, so that the tier can find its pages again by reading the folder. It does so only where
# index.json is missing. That file is written with every 256th page and at close(), and one that is there is believed, however old: files
# that it does not name are not looked at. After a kill the pages since it was written are misses, although their files are whole. Nobody
# counts or evicts those files any more: each kill leaves up to 255 pages beyond the size that was configured, while the metrics
# disk_bytes_used and disk_keys stay within it, and there is no line. With index.json taken away all pages are known again, and the next
# page that is saved brings the disk back to its bound.
#
# Seen, CPython 3.11, peercache 0.8.4, pages of 64 KiB, room for 100; each life saves new pages until they are written:
#   saves 300 knew 0 at its start, at its end reports 100 with 100 files, killed
#   saves 200 knew 56 at its start, at its end reports 100 with 144 files, killed
#   saves 200 knew 0 at its start, at its end reports 100 with 244 files, killed
#   saves 200 knew 0 at its start, at its end reports 100 with 344 files, killed
#   saves 200 knew 0 at its start, at its end reports 100 with 444 files, closed
#   saves 1 knew 100 at its start, at its end reports 100 with 444 files, closed
#   index.json removed
#   saves 1 knew 444 at its start, at its end reports 100 with 100 files, closed
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps peercache==0.8.4 >&2

cat >"$folder/life.py" <<'PYTHON'
"""One life of a disk tier: saves pages of its own, waits until they are written, and is killed or closes."""
import os
import signal
import sys
import time

from peercache.diskstore import DiskStore

PAGE, ROOM = 64 << 10, 100
folder, life, pages, end = sys.argv[1:]
tier = DiskStore(folder, ROOM * PAGE)


def reported():
    used, keys = tier.stats()
    assert used == keys * PAGE
    return keys


def files():
    return sum(name.endswith(".bin") for name in os.listdir(folder))


print(f"saves {pages} knew {reported()} at its start,", end=" ")
names = [f"page {number} of life {life}" for number in range(int(pages))]
for name in names:
    tier.put(name, bytes(PAGE))
while not tier.exists(names[-1]):
    time.sleep(0.01)
time.sleep(0.5)  # the last page's evictions, and index.json
print(f"at its end reports {reported()} with {files()} files, {end}", flush=True)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
tier.close()
PYTHON

live() {
  "$folder/venv/bin/python" "$folder/life.py" "$folder/tier" "$@" || [ $? -eq 137 ]
}
{
  live 1 300 killed
  live 2 200 killed
  live 3 200 killed
  live 4 200 killed
  live 5 200 closed
  live 6 1 closed
  rm "$folder/tier/index.json"
  echo index.json removed
  live 7 1 closed
} >"$folder/seen" 2>"$folder/errors"
cat "$folder/seen"
cat >"$folder/expected" <<'TEXT'
saves 300 knew 0 at its start, at its end reports 100 with 100 files, killed
saves 200 knew 56 at its start, at its end reports 100 with 144 files, killed
saves 200 knew 0 at its start, at its end reports 100 with 244 files, killed
saves 200 knew 0 at its start, at its end reports 100 with 344 files, killed
saves 200 knew 0 at its start, at its end reports 100 with 444 files, closed
saves 1 knew 100 at its start, at its end reports 100 with 444 files, closed
index.json removed
saves 1 knew 444 at its start, at its end reports 100 with 100 files, closed
TEXT
if ! diff -u "$folder/expected" "$folder/seen"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
