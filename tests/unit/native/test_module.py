"""Libraries that the native module needs on the machine it runs on."""

import shutil
import subprocess

import pytest

import kvpool_native

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
