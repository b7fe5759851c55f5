"""The rule that a kind of tier is named in its own rooms alone: all other code is written against its interface."""

import ast
from pathlib import Path

from tests.rigs.runs.for_each import for_each

ROOT = Path(__file__).parents[2]
# Where a kind of tier may be named: its own rooms, its options and where they are set, its place in the composition, and names
# that are public: levels, events, metrics, failpoints, commands.
SSD_NAMED_IN = (
    "kvpool/tiers/ssd/",
    "kvpool/config/",
    "kvpool/cli/",
    "kvpool/pool/lower_tiers.py",
    "kvpool/tiers/store/objects.py",  # its objects have the headers of slots on disk
    "kvpool/states.py",
    "kvpool/router_events/vllm_format.py",
    "kvpool/server/metrics/definitions.py",
    "kvpool/server/reload.py",
    "kvpool/failpoint.py",
)


HBM_NAMED_IN = (
    "kvpool/tiers/hbm/",
    "kvpool/config/",
    "kvpool/pool/lower_tiers.py",
    "kvpool/states.py",
    "kvpool/journal/",  # what engines have is at the same level
    "kvpool/router_events/vllm_format.py",
    "kvpool/server/metrics/definitions.py",
    "kvpool/server/metrics/hbm_definitions.py",
)
NAMED_IN = {"ssd": SSD_NAMED_IN, "hbm": HBM_NAMED_IN}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@for_each(sorted((ROOT / "kvpool").rglob("*.py")), _name)
def test_a_kind_of_tier_is_named_in_its_own_rooms_alone(path: Path) -> None:
    """Everybody else is written against `tiers/base.py` and `tiers/remote.py`: no identifier and no string, but docstrings."""
    refused = [kind for kind, rooms in NAMED_IN.items() if not _name(path).startswith(rooms)]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            words.append(node.value)
        texts = [word.lower() for word in words if isinstance(word, str)]
        named = [text for text in texts if any(kind in text for kind in refused)]
        assert not named, f"names {named[0]!r} in line {getattr(node, 'lineno', 0)}"
