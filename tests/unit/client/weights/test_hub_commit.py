"""The commit of a model of the Hub: from the cache that huggingface_hub uses, as it was when the process began."""

from pathlib import Path

import pytest

from kvpool.errors import LayoutMismatch
from kvpool_client.engines import weights
from kvpool_client.engines.weights import cached_commit
from kvpool_client.engines.weights_reading import TICK_NS
from tests.rigs.held_weights import begun_now

__all__ = ["begun_now"]
# Where the cache is, by what says so: the first one that is set.
CACHES = {
    "HF_HUB_CACHE": "",
    "HUGGINGFACE_HUB_CACHE": "",
    "HF_HOME": "hub",
    "XDG_CACHE_HOME": "huggingface/hub",
    "HOME": ".cache/huggingface/hub",
}


def write_reference(cache: Path, commit: str) -> Path:
    """The commit of the branch `main` of org/model."""
    references = cache / "models--org--model" / "refs"
    references.mkdir(parents=True, exist_ok=True)
    (references / "main").write_text(commit)
    return references / "main"


@pytest.mark.usefixtures("begun_now")
def test_the_cache_is_found_as_the_hub_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {name: str(tmp_path / name) for name in CACHES}
    for digit, (name, below) in enumerate(CACHES.items()):
        write_reference(tmp_path / name / below, str(digit) * 40)
    monkeypatch.setenv("HOME", environment["HOME"])
    for digit, name in enumerate(CACHES):
        assert cached_commit("org/model", "", environment) == str(digit) * 40
        del environment[name]
    assert cached_commit("org/model", "", {"HF_HOME": "~/.cache/huggingface"}) == "4" * 40


def test_a_reference_that_has_changed_since_the_process_began_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    reference = write_reference(tmp_path / "hub", "a" * 40)
    changed_ns = reference.stat().st_ctime_ns
    monkeypatch.setattr(weights, "process_began_ns", lambda: changed_ns)
    assert cached_commit("org/model", "main", environment) == "a" * 40
    monkeypatch.setattr(weights, "process_began_ns", lambda: changed_ns - 2 * TICK_NS)
    with pytest.raises(LayoutMismatch, match="main' has changed since the engine started"):
        cached_commit("org/model", "main", environment)
    assert cached_commit("org/model", "c" * 40, environment) == "c" * 40, "a commit is no reference"
