"""Start of `kvpoolctl`: it imports the command that is asked for and no other, and refuses what contradicts itself."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvpool_tools.cli.kvpoolctl import MODULES, cli

COMMANDS = Path(__file__).parents[3] / "tools" / "kvpool_tools" / "cli" / "commands"
IMPORTED = """
import sys
from click.testing import CliRunner
from kvpool_tools.cli.kvpoolctl import cli
done = CliRunner().invoke(cli, [sys.argv[1], "--help"])
assert done.exit_code == 0, done.output
print(*sorted(name for name in sys.modules if name.startswith("kvpool_tools.cli.commands.")))
print(*sorted({"rich", "kvpool_client", "asyncio"} & set(sys.modules)))
"""


def test_every_command_is_found_by_its_name_in_its_module() -> None:
    modules = [
        ".".join(path.relative_to(COMMANDS).with_suffix("").parts)
        for path in COMMANDS.rglob("[!_]*.py")
        if "@cli." in path.read_text()
    ]
    for module in modules:
        importlib.import_module(f"kvpool_tools.cli.commands.{module}")
    assert set(cli.commands) == set(MODULES)
    assert set(MODULES.values()) == set(modules)


@pytest.mark.parametrize("name", [pytest.param("info", marks=pytest.mark.slow), "log-level"])
def test_a_command_is_imported_alone_and_without_what_it_does_not_use(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, name], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"kvpool_tools.cli.commands.{MODULES[name]}\n\n"


def test_an_unknown_command_is_wrong_usage() -> None:
    refused = CliRunner().invoke(cli, ["defragment"])
    assert refused.exit_code == 2
    assert "No such command 'defragment'." in refused.output
    assert "No such command 'model', did you mean models?" in CliRunner().invoke(cli, ["model"]).output


FLUSHES = [
    (["--force"], "--force goes with --demote"),
    (["--model", ""], "--model is empty"),
    ([], "name what to drop"),
    (["--all", "--model", "m"], "--all goes with neither"),
    (["--all", "--older-than", "1h"], "--all goes with neither"),
    (["--demote", "--model", "m"], "it goes with no other choice than --all"),
    (["--demote", "--older-than", "1h"], "it goes with no other choice than --all"),
    (["--demote", "--tier", "dram"], "it goes with no other choice than --all"),
]


@pytest.mark.parametrize(("choices", "words"), FLUSHES, ids=[" ".join(choices) or "none" for choices, _ in FLUSHES])
def test_choices_of_flush_that_contradict_one_another_are_refused_before_anything_is_asked(
    choices: list[str], words: str
) -> None:
    refused = CliRunner().invoke(cli, ["--socket", "/nonexistent/kvpool.sock", "flush", *choices, "--yes"])
    assert refused.exit_code == 2
    assert words in refused.output
    assert "/nonexistent" not in refused.output
