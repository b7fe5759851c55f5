#!/bin/sh
# SGLang's file tier of HiCache deletes every page when another program fills the disk, and then refuses the page that it made room for.
#
#   findings/sglang_file_tier_empties_for_a_refused_page.sh   needs python3 with its venv module; installs into a temporary folder, which
#                                                             needs 4 GB on its disk for a moment besides (300 MB of downloads)
#
# `min_free_space` of HiCacheFile (or SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE) keeps that much of the disk free: before a page is written
# pages that were used longest ago are deleted until it would still be. Whether that can be reached is not asked. Where another program has
# taken more than the cache's own files could give back, the first page to be saved deletes them all and is refused, and a new process
# deletes them before anything is saved. The disk is no less full for what the cache was, and the cache is empty when the other program has
# cleaned up. The one line, a warning, names the refused page and not what was deleted. `max_size` alone does not do it.
#
# Seen, CPython 3.11, sglang 0.5.23 (its storage modules from the wheel, without the engine), torch 2.13.0; 32 pages of 1 MiB, min_free_space
# 1 GiB below what is free, the other program takes 3 GiB:
#   min_free_space: pages there 32, disk full, page saved False, pages there 0, disk free again, pages there 0
#   min_free_space, restarted while the disk is full: pages there 32, then 0
#   max_size: pages there 32, disk full, page saved True, pages there 32, disk free again, pages there 32
#   warnings: 1, with "evict" or "delet" 0
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0 numpy==2.2.6 >&2
$pip download --no-deps --dest "$folder" sglang==0.5.23 >&2
"$folder/venv/bin/python" -m zipfile -e "$folder"/sglang-*.whl "$folder/wheel"

cat >"$folder/judge.py" <<'PYTHON'
import logging
import os
import sys
import types

wheel, folder = sys.argv[1:]
packages = "sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage", "sglang.srt.mem_cache.storage.file", "sglang.srt.utils"
for name in packages:  # without what their __init__ imports, the engine
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(wheel, *name.split("."))]
common = sys.modules["sglang.srt.utils.common"] = types.ModuleType("sglang.srt.utils.common")
common.human_readable_int = int  # reads sizes given as text; these here are numbers

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402

GIB, PAGES = 1 << 30, 32
said = []


class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


logging.getLogger("sglang").addHandler(Keep(logging.WARNING))


def free():
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def tier(of, **config):
    return HiCacheFile(HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, enable_storage_metrics=False,
        is_page_first_layout=False, model_name="model", extra_config={"file_storage_path": os.path.join(folder, of), **config},
    ))


def page(number):
    return torch.full((1 << 20,), number, dtype=torch.uint8)


def there(store):
    return sum(store.exists(f"{number:064x}") for number in range(PAGES))


def filled(of, **config):
    store = tier(of, **config)
    assert all(store.set(f"{number:064x}", page(number)) for number in range(PAGES))
    return store


def other_program():
    with open(os.path.join(folder, "other"), "wb") as made:
        os.posix_fallocate(made.fileno(), 0, 3 * GIB)


def cleans_up():
    os.remove(os.path.join(folder, "other"))


def through_a_full_disk(name, **config):
    store = filled(name, **config)
    print(f"{name}: pages there {there(store)}, disk full,", end=" ")
    other_program()
    print(f"page saved {store.set('f' * 64, page(255))}, pages there {there(store)},", end=" ")
    cleans_up()
    print(f"disk free again, pages there {there(store)}", flush=True)


through_a_full_disk("min_free_space", min_free_space=free() - GIB)
warnings = len(said)
about = sum("evict" in line or "delet" in line for line in said)
bound = free() - GIB
store = filled("restarted", min_free_space=bound)
print(f"min_free_space, restarted while the disk is full: pages there {there(store)},", end=" ")
other_program()
print("then", there(tier("restarted", min_free_space=bound)))
cleans_up()
through_a_full_disk("max_size", max_size=GIB)
print(f'warnings: {warnings}, with "evict" or "delet" {about}')
PYTHON

cat >"$folder/expected" <<'TEXT'
min_free_space: pages there 32, disk full, page saved False, pages there 0, disk free again, pages there 0
min_free_space, restarted while the disk is full: pages there 32, then 0
max_size: pages there 32, disk full, page saved True, pages there 32, disk free again, pages there 32
warnings: 1, with "evict" or "delet" 0
TEXT
mkdir "$folder/disk"
"$folder/venv/bin/python" "$folder/judge.py" "$folder/wheel" "$folder/disk" 2>"$folder/errors" | tee "$folder/seen"
if ! diff -u "$folder/expected" "$folder/seen"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
