"""Native module on this machine: the libraries it needs, and its variants of checksums and copies."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import kvpool_client as kv
import kvpool_native
from kvpool_client.copying.cache import Cache

# The C and C++ run-time libraries, which every machine with compiled programs has.
LIBRARIES = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libatomic", "ld-linux-x86-64"}


def _readelf(*options: str) -> str:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed: apt-get install binutils")
    command = [readelf, "--wide", *options, kvpool_native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_it_needs_only_libraries_that_every_machine_has() -> None:
    needed = {line.split("[")[1].split(".so")[0] for line in _readelf("--dynamic").splitlines() if "(NEEDED)" in line}
    assert needed
    assert needed <= LIBRARIES


def test_statically_linked_symbols_are_not_exported() -> None:
    names = {line.split()[-1] for line in _readelf("--dyn-syms").splitlines() if line.strip()}
    assert "PyInit_kvpool_native" in names
    assert not {name for name in names if name.startswith("io_uring")}


def test_the_environment_names_the_copys_variant_or_is_refused() -> None:
    def run(variant: str) -> "subprocess.CompletedProcess[str]":
        code = "import kvpool_native as k; k.tune_copies(); print(k.copy_variant_fault(), k.copy_choices())"
        environment = {**os.environ, "KVPOOL_COPY_VARIANT": variant}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert "expected one of stream, stream-next256" in run("fastest").stdout
    assert "'copy_tuning_seconds': 0.0" in run("stream-l1-2k").stdout


def test_a_daemon_refuses_an_unknown_variant() -> None:
    environment = {**os.environ, "KVPOOL_COPY_VARIANT": "fastest"}
    daemon = [sys.executable, "-m", "kvpool.cli.kvpoold", "--set", "dram.capacity=16MiB"]
    run = subprocess.run(daemon, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, "KVPOOL_COPY_VARIANT is 'fastest'" in run.stderr) == (2, True)


def test_a_cache_refuses_an_unknown_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpool_native, "copy_variant_fault", lambda: "KVPOOL_COPY_VARIANT is 'fastest'")
    layout = kv.Layout(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", chunk_tokens=32)
    with pytest.raises(kv.InvalidArgument, match="KVPOOL_COPY_VARIANT is 'fastest'"):
        Cache([np.zeros((2, 4, 16, 1, 64), np.uint16)], layout, block_tokens=16, form="kv_first")
