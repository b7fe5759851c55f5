"""vLLM's own tiers on a CPU without the pool: where these tokens differ, the rig is wrong and not the pool's tier."""

from pathlib import Path

from tests.engines.vllm.conftest import Plain, StartEngine
from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, tiering
from tests.engines.vllm.rigs.prompts import prompts
from tests.engines.vllm.rigs.tiny_models import GROUPED
from tests.engines.vllm.tier.conftest import TOKENS, answers, answers_with_region, hit_tokens, whole_chunks


def test_the_region_and_vllms_tier_of_files_change_no_token(
    start_engine: StartEngine, plain: Plain, tmp_path: Path
) -> None:
    asked = prompts(first=5900)
    expected, everything = plain(GROUPED).tokens(asked, TOKENS), whole_chunks(asked) * BLOCK_TOKENS
    engine = start_engine(GROUPED, transfer=tiering({"type": "fs", "root_dir": str(tmp_path)}))
    assert answers(engine, asked) == expected
    assert hit_tokens(engine) == 0
    assert answers_with_region(engine, asked) == expected
    assert hit_tokens(engine) == everything
    assert answers(engine, asked) == expected, "from files"
    assert hit_tokens(engine) == 2 * everything
