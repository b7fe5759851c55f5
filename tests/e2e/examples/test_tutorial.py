"""The tutorial's engine: it runs as its page says, and every piece of code in it is an example's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.daemon import Daemon, importing

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "tiny_engine.py"
BLOCK_EXAMPLE = ROOT / "examples" / "block_engine.py"
BATCH_EXAMPLE = ROOT / "examples" / "batch_engine.py"
DEMO = ROOT / "demo" / "engine.py"
ENGINE_EXAMPLE = ROOT / "examples" / "engine"
PAGE = ROOT / "docs" / "torch.md"


def _run(socket: str, device: str) -> tuple[int, str]:
    """Reused tokens and the line of tokens."""
    command = [sys.executable, str(EXAMPLE), "--socket", socket, "--device", device]
    environment = {**importing(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    found = re.search(r"(\d+) of 1500 prompt tokens reused\n(tokens: .+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return int(found[1]), found[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_second_run_reuses_what_the_first_computed(daemon: Daemon, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    cold = _run(daemon.socket, device)
    warm = _run(daemon.socket, device)
    daemon.stop()
    alone = _run(daemon.socket, device)
    assert (cold[0], warm[0], alone[0]) == (0, 1472, 0)
    assert cold[1] == warm[1] == alone[1]


def _run_blocks(socket: str, *arguments: str) -> tuple[list[int], list[str]]:
    """Reused tokens of each question, and the lines of tokens."""
    command = [sys.executable, "-m", "examples.block_engine", "--socket", socket, "--device", "cpu", *arguments]
    environment = {**importing(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True, cwd=ROOT)
    reused = [int(found) for found in re.findall(r"(\d+) of 1370 prompt tokens reused", done.stdout)]
    return reused, re.findall("tokens: .+", done.stdout)


@pytest.mark.slow
def test_an_engine_over_a_block_pool_reuses_blocks_and_after_a_restart_chunks(daemon: Daemon) -> None:
    cold = _run_blocks(daemon.socket)
    warm = _run_blocks(daemon.socket)
    daemon.stop()
    alone = _run_blocks(daemon.socket)
    assert (cold[0], warm[0], alone[0]) == ([0, 1350, 1350], [1344, 1350, 1350], [0, 1350, 1350])
    assert cold[1] == warm[1] == alone[1]
    assert len(cold[1]) == 4


def test_the_code_on_the_page_is_the_examples() -> None:
    sources = [EXAMPLE, BLOCK_EXAMPLE, BATCH_EXAMPLE, DEMO, *sorted(ENGINE_EXAMPLE.rglob("*.py"))]
    lines = [line.strip() for source in sources for line in source.read_text().splitlines() if line]
    tutorial = PAGE.read_text().partition("\n## Tutorial\n")[2].partition("\n## ")[0]
    pieces = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
    assert len(pieces) == 9
    for piece in pieces:
        wanted = [line.strip() for line in piece.strip().splitlines() if line]
        assert any(lines[at : at + len(wanted)] == wanted for at in range(len(lines))), piece
