"""The engines' pages: every counter, label, setting, daemon option, command and link in them exists.

vLLM's own options are held to its own parser by tests/engines/vllm/test_pages.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kvpool.config.config import OPTIONS
from kvpool.states import LoadReason, SaveState
from kvpool_client.engines.settings import kinds_of
from kvpool_client.lmcache.settings import Settings as LMCacheSettings
from kvpool_client.sglang.settings import Settings as SGLangSettings
from kvpool_client.trtllm import settings as tensorrt_llm
from kvpool_client.vllm.prometheus import COUNTERS, FAMILIES
from kvpool_client.vllm.settings import PREFIX
from kvpool_client.vllm.settings import Settings as VLLMSettings
from kvpool_client.vllm.tier import Settings as TierSettings
from kvpool_client.vllm.tier import metrics as tier_metrics
from kvpool_tools.cli.kvpoolctl import MODULES

ROOT = Path(__file__).parents[4]
CLIENT = ROOT / "client" / "kvpool_client"
OVERVIEW = ROOT / "docs" / "engines.md"
PAGES = {page.stem: page for page in (OVERVIEW, *sorted((ROOT / "docs" / "engines").glob("*.md")))}
# What the overview has of an engine without a page of its own.
SECTIONS = {"sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
VARIABLES = {name.upper() for name in kinds_of(tensorrt_llm.Settings, tensorrt_llm._OWN)}
LABELS = {name: label for name, label, _ in FAMILIES}
# The prefixes of the labels under which refusals, failed calls and ends of loads are counted.
PREFIXES = ("refused_", "failed_", "loads_")


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every string of one line in the client's code and the daemon's, pieces of formatted ones included."""
    text = "\n".join(path.read_text() for path in (*CLIENT.rglob("*.py"), *(ROOT / "kvpool").rglob("*.py")))
    strings = re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)
    return {piece for string in strings for piece in re.split(r"\{[^{}]*\}", string)}


def text_about(engine: str) -> str:
    """An engine's page, or its section of the overview."""
    if engine in PAGES:
        return PAGES[engine].read_text()
    return OVERVIEW.read_text().partition(f"\n## {SECTIONS[engine]}\n")[2].partition("\n## ")[0]


def troubles(engine: str) -> Iterator[list[str]]:
    """The cells of an engine's table for troubleshooting, row by row."""
    for line in re.split(r"\n##.*roubleshooting\n", text_about(engine))[1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "symptom":
            yield cells


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_settings_in_a_pages_commands_are_json(page: Path) -> None:
    commands = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    given = [words for command in commands for words in re.findall(r"'(\{.*?\})'", command, re.DOTALL)]
    assert given
    for words in given:
        assert isinstance(json.loads(words), dict)


@pytest.mark.parametrize("engine", ["vllm", *SECTIONS])
def test_an_engine_has_a_table_for_troubleshooting_and_figures(engine: str) -> None:
    rows = list(troubles(engine))
    assert len(rows) >= 5
    assert all(len(row) == 4 and all(row) for row in rows), rows
    assert SECTIONS.get(engine, "vLLM") in (ROOT / "docs" / "performance.md").read_text()
    assert "](engines/vllm.md)" in OVERVIEW.read_text()


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page: str) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", PAGES[page].read_text()):
        path = (PAGES[page].parent / target) if target else PAGES[page]
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [re.sub(r"[^\w-]", "", line.lower().replace(" ", "-")) for line in headings]


@pytest.mark.parametrize("page", PAGES)
def test_settings_and_options_that_a_page_names_exist(page: str) -> None:
    text = PAGES[page].read_text()
    known = {PREFIX + field.name for field in fields(VLLMSettings)}
    assert set(re.findall(r"\bkvpool\.[a-z_]+", text)) - {"kvpool.sock", "kvpool.toml"} <= known
    tables = "|".join(sorted({name.partition(".")[0] for name in OPTIONS}))
    assert set(re.findall(rf"`((?:{tables})\.[a-z_]+)", text)) <= set(OPTIONS)
    assert set(re.findall(rf"\b{tensorrt_llm.PREFIX}([A-Z_]+)", text)) <= VARIABLES
    commands = set(MODULES)
    assert set(re.findall(r"`kvpoolctl (?:--socket \S+ )?([a-z]+)", text)) <= commands


@pytest.mark.parametrize(
    ("page", "prefix", "settings"),
    [
        ("vllm", PREFIX, {field.name for field in fields(VLLMSettings)}),
        ("lmcache", "", {field.name for field in fields(LMCacheSettings)}),
        ("sglang", "", {field.name for field in fields(SGLangSettings)} - {"socket", "source"}),
        ("tensorrt-llm", tensorrt_llm.PREFIX, VARIABLES),
    ],
)
def test_a_table_of_settings_is_whole(page: str, prefix: str, settings: set[str]) -> None:
    text = text_about(page)
    assert set(re.findall(rf"^\| `{re.escape(prefix)}(\w+)` \|", text, re.MULTILINE)) == settings


@pytest.mark.parametrize("page", PAGES)
def test_counters_of_vllm_that_a_page_names_exist(page: str, words: set[str]) -> None:
    for name, label, value in re.findall(
        r"vllm:kvpool_(\w+?)(?:_total)?(?:\{(\w+)=\"([^\"]+)\"\})?`", PAGES[page].read_text()
    ):
        assert name in LABELS or name in COUNTERS, name
        if not label:
            continue
        assert LABELS[name] == label, f"{name} by {label}"
        reasons = {"failed_loads": LoadReason, "short_loads": LoadReason, "declined_chunks": SaveState}.get(name, ())
        outcomes = {reason.name.lower().replace("_", "-") for reason in reasons}
        counted = f"{name}_{re.sub('_(dram|ssd)$', '', value)}"
        assert value in outcomes or counted in words or (name == "hints" and value in words), f"{name} {value}"


def test_every_counter_of_vllm_is_on_its_page() -> None:
    text = PAGES["vllm"].read_text()
    assert {*LABELS, *COUNTERS} <= set(re.findall(r"`vllm:kvpool_(\w+)`", text))


def test_the_tier_has_its_settings_and_counters_on_the_page(words: set[str]) -> None:
    section = PAGES["vllm"].read_text().partition("\n## The secondary tier\n")[2].partition("\n## ")[0]
    of_settings, _, of_troubles = section.partition("\n### The tier: troubleshooting\n")
    known = {field.name for field in fields(TierSettings)} | {"backpressure"}  # vLLM's own
    table = of_settings.partition("**New weights**")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == known
    reasons = {one.name.lower() for one in (*LoadReason, *SaveState)} | {word.partition(":")[0] for word in words}
    family, shown = "", set()
    for line in of_troubles.splitlines():
        cell = line.split(" | ")[1] if line.startswith("| ") else ""
        for name, reason in re.findall(r"`(\w*)(?:\{reason=\"(\w+)\"\})?`", cell):
            family = name or family  # further reasons follow
            if family.startswith("tiering_") or family == "evicted_chunks":
                continue  # vLLM's and the daemon's
            assert family in (tier_metrics.BY_REASON if reason else tier_metrics.COUNTERS), line
            assert not reason or reason in reasons or f"{family}_{reason}" in words, line
            shown.add(family)
    assert set(tier_metrics.BY_REASON) <= shown


@pytest.mark.parametrize("page", ["sglang", "tensorrt-llm"])
def test_counters_of_the_other_adapters_that_a_page_names_exist(page: str, words: set[str]) -> None:
    begun = {word.partition(":")[0] for word in words}
    for _, cell, *_ in troubles(page):
        for counter in re.findall(r"`([a-z_]+)`", cell):
            rest = next((counter.removeprefix(prefix) for prefix in PREFIXES if counter.startswith(prefix)), "")
            assert counter in words or rest in begun, counter
