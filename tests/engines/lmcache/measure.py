"""`lmcache bench l2` on the plug-in, on LMCache's own fs adapter on the same disk and on a dict, in turns.

    PYTHONPATH=.:client:tools:LMCACHE:SITE .venv/bin/python -m tests.engines.lmcache.measure FOLDER [TURNS] [KIB] [KEYS]

LMCACHE is an unpacked wheel, SITE what it imports (`make test-lmcache` makes both in build/lmcache), FOLDER on the disk. Each
turn runs the benchmark once with each adapter, in processes of their own; printed are the median and the range over turns of
the median round, and the median of each turn's ratio to the dict. The daemon is of the turn's own, and has no SSD tier; the fs
adapter's files stay in the page cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.rigs.daemon import Daemon

OPERATIONS = ("Store", "Lookup", "Load")
ROUNDS = 20


def main() -> None:
    folder = Path(sys.argv[1])
    turns, kib, keys = _given()
    seen: dict[str, dict[str, list[float]]] = {}
    for turn in range(turns):
        capacity = {"dram.capacity": f"{2 * kib * keys * (ROUNDS + 2)}KiB"}
        with tempfile.TemporaryDirectory(dir=folder) as place, Daemon(Path(place), **capacity) as daemon:
            for name, adapter in _adapters(daemon, Path(place)).items():
                for operation, duration_ms in _run(adapter, kib, keys).items():
                    seen.setdefault(operation, {}).setdefault(name, []).append(duration_ms)
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
    for operation, by_name in seen.items():
        for name, found in by_name.items():
            ratio = statistics.median(own / floor for own, floor in zip(found, by_name["dict"], strict=True))
            spread = f"{min(found):.2f}-{max(found):.2f}"
            rate = "" if operation == "Lookup" else f" {kib * keys / 1024 / statistics.median(found):7.2f} GB/s"
            print(
                f"{operation:7} {name:7} {statistics.median(found):8.2f} ms ({spread}){rate}  x{ratio:.2f} of the dict"
            )


def _given() -> list[int]:
    given = [int(value) for value in sys.argv[2:]]
    return [*given, *(5, 1024, 16)[len(given) :]]


def _adapters(daemon: Daemon, place: Path) -> dict[str, dict[str, Any]]:
    params = {"socket": daemon.socket, "revision": "1"}
    kvpool = {"module_path": "kvpool_client.lmcache", "class_name": "KVPoolAdapter", "adapter_params": params}
    floor = {"module_path": "tests.engines.lmcache.dict_adapter", "class_name": "DictAdapter"}
    return {
        "kvpool": {"type": "plugin", **kvpool},
        "fs": {"type": "fs", "base_path": str(place / "fs")},
        "dict": {"type": "plugin", **floor},
    }


def _run(adapter: dict[str, Any], kib: int, keys: int) -> dict[str, float]:
    """The median round of each operation, in milliseconds."""
    shape = ["--num-keys", str(keys), "--data-size-kb", str(kib), "--rounds", str(ROUNDS), "--l1-align-bytes", "4096"]
    checks = ["--no-skip-verify", "--lookup-max-hit-rate", "1", "--format", "json"]
    command = [sys.executable, "-m", "tests.engines.lmcache.benchmark_driver", "--l2-adapter", json.dumps(adapter)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # of torch's copies, whose threads wait for one another
    done = subprocess.run([*command, *shape, *checks], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found, _ = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{\n"))
    sections = [section for section in found["metrics"].values() if section.get("operation") in OPERATIONS]
    for section in sections:
        assert section["total_success"] == section["total_keys"], section
    return {section["operation"]: float(section["duration_p50_ms"]) for section in sections}


if __name__ == "__main__":
    main()
