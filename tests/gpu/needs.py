"""Needs of the GPU run: what this machine lacks, in ten seconds, and what it is. Imports torch in a process of its own."""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

LACKS = "make test-gpu needs what this machine lacks:"
TIMEOUT_S = 120.0
# Modules, and the packages that have them.
MODULES = {
    "numpy": "numpy", "msgpack": "msgpack", "uvloop": "uvloop", "click": "click", "rich": "rich", "lmdb": "lmdb",
    "zmq": "pyzmq", "prometheus_client": "prometheus-client", "torch": "torch", "transformers": "transformers",
    "pytest": "pytest", "pytest_asyncio": "pytest-asyncio", "xdist": "pytest-xdist", "hypothesis": "hypothesis",
    "blake3": "blake3",
}  # fmt: skip
TOOLS = ("g++", "cmake", "ninja")
_LOOK = """
import ctypes, json, torch
found = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none"}
if torch.cuda.is_available():
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    found |= {"card": torch.cuda.get_device_name(), "driver's CUDA": f"{version.value // 1000}.{version.value % 1000 // 10}"}
print(json.dumps(found))
"""


def missing(*, is_rehearsal: bool, can_build: bool = False) -> list[str]:
    """What the run cannot do without, one line each. `can_build`: what builds the native module will do instead of it."""
    lacks = []
    if platform.system() != "Linux":
        lacks.append(f"Linux: this is {platform.system()}")
    if tuple(map(int, platform.python_version_tuple()[:2])) < (3, 10):
        lacks.append(f"Python 3.10: this is {platform.python_version()}")
    packages = [package for module, package in MODULES.items() if importlib.util.find_spec(module) is None]
    if packages:
        lacks.append(f"packages: {' '.join(packages)} (put their wheels into a folder: make test-gpu WHEEL=FOLDER)")
    if importlib.util.find_spec("kvpool_native") is None:
        tools = [tool for tool in TOOLS if shutil.which(tool) is None]
        tools += ["nanobind"] if importlib.util.find_spec("nanobind") is None else []
        if tools or not can_build:
            without = f", without {', '.join(tools)}" if tools else ""
            lacks.append(f"the native module{without}: install these, or put its wheel into a folder (WHEEL=FOLDER)")
    if shutil.which("g++") is None:
        lacks.append("g++: the older drivers of the tests are built with it")
    if not lacks and not is_rehearsal and "card" not in machine():
        lacks.append("a CUDA device that torch sees: nvidia-smi lists those there are")
    return lacks


def main() -> int:
    """Print what is missing before anything is built; the exit code."""
    lacks = missing(is_rehearsal=False, can_build=True)
    if lacks:
        print(LACKS, *(f"  {line}" for line in lacks), sep="\n", file=sys.stderr)
    return 2 if lacks else 0


@cache
def machine() -> dict[str, Any]:
    """What the results are of."""
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else {"torch": done.stderr.strip().splitlines()[-1:]}
    return {**found, "Python": platform.python_version(), "processor": _processor(), "cores": os.cpu_count()}


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        named = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(named, platform.machine())


if __name__ == "__main__":
    sys.exit(main())
