"""Description of the machine that a document's figures are from. Reads the system alone; any thread."""

import os
import platform
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """Processor, cores that may be used, kernel, Python, and the current load of the machine."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
