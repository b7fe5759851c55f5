"""The example of a long document: one prompt, questions by forks, both ways of attention, and a second run from the pool."""

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.rigs.daemon import Start
from tests.rigs.late_module import LateModule

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")
if TYPE_CHECKING:
    from examples import long_context
else:
    long_context = LateModule("examples.long_context")

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
TOKENS = 3072
SHORT = ("--tokens", str(TOKENS), "--questions", "2", "--answer-tokens", "6")


def run(*options: str) -> str:
    done = CliRunner().invoke(long_context.main, [*SHORT, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_it_starts_its_daemon_and_answers_both_ways() -> None:
    command = [sys.executable, "-m", "examples.long_context", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"0 tokens from the pool, {TOKENS} computed" in done.stdout
    memory = re.search(r"KV of the whole: 6\.0 MiB; in this process: .* \((\d+)%\)", done.stdout)
    assert memory is not None, done.stdout
    assert int(memory[1]) < 50, "what has left the window is in the daemon's memory"
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [int(row[0]) for row in rows] == [1, 2]
    for row in rows:
        assert all(float(cell) > 0 for cell in row[1:5])
        assert 0 < float(row[6]) < 1
    assert long_context.QUESTIONS[1] in done.stdout


@pytest.mark.slow
def test_at_a_budget_of_everything_tokens_are_equal_and_a_second_run_finds_the_document(start_daemon: Start) -> None:
    daemon = start_daemon(dram__capacity="64MiB")
    cold = run("--socket", daemon.socket, "--budget", "100")
    warm = run("--socket", daemon.socket, "--budget", "100")
    assert f"0 tokens from the pool, {TOKENS} computed" in cold
    found = re.search(r"(\d+) tokens from the pool, (\d+) computed", warm)
    assert found is not None, warm
    assert int(found[1]) >= TOKENS // 2
    assert int(found[1]) + int(found[2]) == TOKENS
    for output in (cold, warm):
        assert output.count("6 of 6") == 2
    assert re.findall(r"(?m)^   .+$", cold) == re.findall(r"(?m)^   .+$", warm)


def test_questions_are_typed_until_an_empty_line() -> None:
    with CliRunner().isolation(input="first\nsecond\n\nthird\n"):
        assert list(long_context.asked(None)) == ["first", "second"]
    with CliRunner().isolation(input="first\n"):
        assert list(long_context.asked(None)) == ["first"]
    assert list(long_context.asked(4)) == [*long_context.QUESTIONS, long_context.QUESTIONS[0]]


def test_the_document_is_cut_to_its_tokens_or_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a long text")
    assert long_context.Bytes().decode(long_context.document_ids(str(text), long_context.Bytes(), 6)) == "a long"
    done = CliRunner().invoke(long_context.main, ["--document", str(text), "--questions", "1"])
    assert done.exit_code == 2
    assert "the document has 11 tokens" in done.output
    assert max(long_context.document_ids(None, long_context.Bytes(), 2000)) < long_context.SMALL["vocab_size"]


@pytest.mark.parametrize("tokens", [1024, 3072, 65536, 131072])
def test_window_and_first_tokens_are_in_proportion(tokens: int) -> None:
    config = long_context.config_for(tokens, 5.0)
    assert config.middle_blocks(tokens) > tokens // 2 // config.block_tokens
    assert config.dense_boundary < tokens
    if tokens == 65536:
        assert (config.init_tokens, config.local_tokens) == (1024, 7192)
