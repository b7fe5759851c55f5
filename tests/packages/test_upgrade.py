"""An upgrade over kept memory: two versions of the wheel side by side; the newer daemon serves what the older one had."""

import contextlib
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon import PROGRAM, wait_until
from tests.rigs.kept_daemon import KeptDaemon

HERE = Path(__file__).parent
NEWER = "9999.1"
TAG = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}" if sys.version_info < (3, 12) else "cp312-abi3"
# Loads what the steady client has saved first, and prints how many chunks were there.
FIND = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np
import kvpool_client as kv
import steady_client
with kv.connect(sys.argv[1], model="package", revision="1", layout=steady_client.LAYOUT) as pool:
    while not pool.connected:
        pass
    into = np.zeros((steady_client.CHUNKS, steady_client.LAYOUT.chunk_bytes), np.uint8)
    print(kv.__version__, steady_client._is_hit(pool, steady_client._keys(pool, 0), into), int(into.sum()))
"""


def _with_version(wheel: Path, version: str, folder: Path) -> Path:
    """The wheel of another version that changes nothing else."""
    before = wheel.name.split("-")[1]
    changed = folder / wheel.name.replace(before, version)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith((".dist-info/METADATA", ".dist-info/RECORD", "kvpool/_version.py")):
                data = data.decode().replace(before, version).encode()
            target.writestr(name.replace(f"kvpool-{before}.", f"kvpool-{version}."), data)
    return changed


def _install(wheel: Path, folder: Path) -> Path:
    """The Python of an environment that has the wheel; what that needs is this one's."""
    venv.create(folder)
    python = folder / "bin/python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    words = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    return python


class InstalledDaemon(KeptDaemon):
    """A daemon of whichever environment is asked for."""

    python: Path

    def command(self) -> list[str]:
        """Of that environment alone."""
        return [str(self.python), "-I", "-m", "kvpool.cli.kvpoold", *super().command()[len(PROGRAM) :]]


@pytest.fixture
def pythons(built: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """Those of an environment with the wheel, and of one with a later version of it."""
    wheel = built(f"kvpool-*-{TAG}-*_x86_64.whl")
    return _install(wheel, tmp_path / "older"), _install(_with_version(wheel, NEWER, tmp_path), tmp_path / "newer")


@pytest.fixture
def daemon(pythons: tuple[Path, Path], tmp_path: Path) -> Iterator[InstalledDaemon]:
    """One whose memory a keeper has."""
    daemon = InstalledDaemon(tmp_path)
    daemon.python = pythons[0]
    with daemon:
        yield daemon


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_dram_is_warm_after_an_upgrade(
    daemon: InstalledDaemon, pythons: tuple[Path, Path], tmp_path: Path, is_killed: bool
) -> None:
    older, newer = pythons
    end = tmp_path / "end"
    client = [str(older), "-I", str(HERE / "steady_client.py"), daemon.socket, str(end)]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(subprocess.Popen(client, stdout=subprocess.PIPE, text=True))
        stack.callback(engine.kill)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "loaded\n"
        before = daemon.info()
        if is_killed:
            daemon.kill()
        else:
            assert daemon.stop() == 0
        daemon.python = newer
        daemon.start()
        after = daemon.info()
        assert (after["version"], after["epoch"] == before["epoch"]) == (NEWER, False)
        assert re.match(r"\d+\.", before["version"])
        chunks = int(daemon.stats()["dram.chunks"])
        assert chunks > 0, "before any client has saved in this life"
        for python in pythons:
            found = subprocess.run(
                [python, "-I", "-c", FIND, daemon.socket], check=True, capture_output=True, text=True, timeout=60
            )
            assert found.stdout.split()[1] == "True"
        # The engine that was there before goes on: it finds its first chunks, and saves new ones.
        wait_until(lambda: int(daemon.stats()["saved_chunks"]) > 0, "the engine of the older version saves again")
        end.touch()
        shown = dict(line.split(":") for line in engine.communicate(timeout=60)[0].splitlines())
    assert engine.returncode == 0
    assert int(shown["saved_since"]) > 0
