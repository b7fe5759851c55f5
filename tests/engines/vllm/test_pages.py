"""Command lines and options of vLLM in docs/ and in remedies: vLLM accepts them."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool_client.vllm.settings import Settings
from kvpool_client.vllm.support import REMEDIES
from kvpool_client.vllm.tier.settings import Settings as TierSettings
from tests.engines.vllm.rigs.engine import ROOT

# Warnings of vLLM and torch about their own code when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PAGE = (ROOT / "docs" / "engines" / "vllm.md").read_text()
# How the engines of the figures were started.
FIGURES = (ROOT / "docs" / "performance.md").read_text().partition("\n## vLLM\n")[2].partition("\n## ")[0]
# Of other programs on these pages.
STRANGERS = {"--socket", "--config"}
SERVER = ["-m", "vllm.entrypoints.openai.api_server", "--model"]


@pytest.fixture(scope="module")
def parser() -> Any:
    """vLLM's own, of everything about an engine. Imports vLLM into this process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--port")  # the server's
    return parser


def commands(text: str) -> Iterator[list[str]]:
    """The vLLM command lines in a text's code blocks, as a shell reads them."""
    functions = "rec() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }; kvpoold() { :; }; curl() { :; }; "
    functions += 'vllm() { rec vllm "$@"; };  python() { rec python "$@"; }'
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    # One shell for all of a text: a block uses what one above it has set.
    script = "\n".join([functions, *(block for language, block in blocks if not language)])
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    for line in done.stdout.split("\n\0"):
        words = line.rstrip("\0").split("\0")
        if words[:2] == ["vllm", "serve"]:
            yield ["--model", *words[2:]]
        elif words[1:4] == SERVER:
            yield words[3:]


@pytest.mark.parametrize(("text", "least"), [(PAGE, 6), (FIGURES, 1)], ids=["page", "figures"])
def test_a_page_has_commands_that_vllm_takes(text: str, least: int, parser: Any) -> None:
    found = list(commands(text))
    assert len(found) >= least
    for words in found:
        transfer = parser.parse_args(words).kv_transfer_config
        if transfer.kv_connector == "OffloadingConnector":
            (tier,) = transfer.kv_connector_extra_config["secondary_tiers"]
            entry = {key: value for key, value in tier.items() if key not in ("type", "module_path")}
            assert TierSettings.of(entry).socket == "/run/kvpool/kvpool.sock"
            continue
        assert transfer.kv_connector in ("KVPoolConnector", "MultiConnector")
        children = transfer.kv_connector_extra_config.get("connectors", [])
        own = [child["kv_connector_extra_config"] for child in children if child["kv_connector"] == "KVPoolConnector"]
        (extra,) = own if children else [transfer.kv_connector_extra_config]
        assert Settings.of(extra).socket == "/run/kvpool/kvpool.sock"


def test_options_named_in_pages_and_remedies_exist_in_vllm(parser: Any) -> None:
    text = " ".join([PAGE, FIGURES, *REMEDIES.values()])
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - STRANGERS
    assert len(named) > 10
    assert named <= set(parser._option_string_actions)
