"""The gather kernel's text is what its source makes. Needs nvcc of the release that the script names."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 120.0


def test_the_shipped_kernel_is_made_from_its_source(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None or shutil.which("ptxas") is None:
        pytest.skip("nvcc is not installed")
    version = subprocess.run(
        ["nvcc", "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    ).stdout
    if "release 13.0" not in version:
        pytest.skip("nvcc is of another release than 13.0")
    made = tmp_path / "gather_kernel.h"
    subprocess.run([str(ROOT / "scripts" / "make-gather-kernel"), str(made)], check=True, timeout=TIMEOUT_S)
    assert made.read_text() == (ROOT / "native" / "device" / "gather_kernel.h").read_text()
