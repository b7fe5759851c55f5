"""Sleep, weights that change in place, waking up: nothing of the old ones is ever loaded with the new ones, or stored as new.

vLLM ignores sleep on the CPU, so the driver does a worker's part of it by hand, between vLLM's own calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import Plain, StartEngine, external_tokens
from tests.engines.vllm.rigs.engine import Engine
from tests.engines.vllm.rigs.prompts import loadable_tokens, prompt, prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED, STRANGER, Geometry
from tests.rigs.daemon import Daemon

COUNT = 16


@dataclass
class Setting:
    """`engine` begins with GROUPED's weights and may get STRANGER's; `replica` has GROUPED's for ever."""

    engine: Engine
    replica: Engine
    paths: Callable[[Geometry], Path]
    plain: Plain

    def change(self, geometry: Geometry, way: str) -> None:
        self.engine.ask("change_weights", path=str(self.paths(geometry)), way=way)

    def sleep_and_change(self, geometry: Geometry, way: str, level: int = 1) -> None:
        self.engine.ask("sleep", level=level, prompts=[prompt(970 + level, 150), prompt(980, 300)])
        self.change(geometry, way)
        self.engine.ask("wake_up")

    def loaded_by(self, asked: list[list[int]], geometry: Geometry, engine: Engine | None = None) -> int:
        """Tokens of the prompts that come from the pool; what is generated is what the weights generate."""
        engine = engine or self.engine
        before = external_tokens(engine)
        assert engine.tokens(asked, COUNT) == self.plain(geometry).tokens(asked, COUNT)
        return external_tokens(engine) - before


@pytest.fixture(scope="module")
def setting(
    start_engine: StartEngine, module_daemon: Daemon, plain: Plain, model: Callable[[Geometry], Path]
) -> Setting:
    options = {"socket": module_daemon.socket, "settings": {"kvpool.save": "all"}}
    return Setting(start_engine(GROUPED, **options), start_engine(GROUPED, **options), model, plain)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", ["reload_weights", "load_weights"])
def test_an_engine_that_wakes_up_with_other_weights_loads_none_of_the_old_ones(
    setting: Setting, level: int, way: str
) -> None:
    asked = prompts(first=940 + 6 * level)
    for geometry in (GROUPED, STRANGER, GROUPED):
        setting.sleep_and_change(geometry, way, level)
        assert setting.loaded_by(asked, geometry) == 0
        assert setting.loaded_by(asked, geometry) >= loadable_tokens(asked)
    setting.loaded_by(asked, GROUPED, setting.replica)
    assert setting.loaded_by(asked, GROUPED, setting.replica) >= loadable_tokens(asked)


@pytest.mark.parametrize("way", ["reload_weights", "load_weights"])
def test_weights_that_change_without_a_reset_of_connectors_are_noticed(setting: Setting, way: str) -> None:
    asked = prompts(first=960)
    setting.sleep_and_change(GROUPED, way)
    setting.loaded_by(asked, GROUPED)
    assert setting.loaded_by(asked, GROUPED) > 0
    setting.change(STRANGER, way)
    assert setting.loaded_by(asked, STRANGER) == 0, "behind vLLM's own reset alone"
    setting.loaded_by(asked, STRANGER)
    assert setting.loaded_by(asked, STRANGER) > 0
    setting.change(GROUPED, way)
    assert setting.loaded_by(asked, GROUPED) == 0
    setting.loaded_by(asked, GROUPED, setting.replica)
    assert setting.loaded_by(asked, GROUPED, setting.replica) >= loadable_tokens(asked)


def test_a_request_that_runs_through_a_change_leaves_nothing_behind(setting: Setting) -> None:
    asked, tokens = prompt(990, 200), 150
    setting.sleep_and_change(GROUPED, "load_weights")
    for geometry in (STRANGER, GROUPED):
        path = str(setting.paths(geometry))
        setting.engine.ask("change_weights_while_running", prompt=asked, tokens=tokens, path=path)
        (generated,) = setting.plain(geometry).tokens([asked], tokens)
        longer = [*asked, *generated, *prompt(991, 40)]
        setting.loaded_by([longer], geometry)
        setting.loaded_by([longer], geometry)
    setting.loaded_by([longer], GROUPED, setting.replica)
