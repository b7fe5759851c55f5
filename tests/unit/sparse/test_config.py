"""SparseConfig: defaults, the environment's names, and clear errors."""

import pytest

import kvpool_client as kv
from kvpool_sparse import SparseConfig


def test_settings_come_from_the_environment() -> None:
    environment = {
        "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "256",
        "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "1000",
        "VLLM_RETRIEVAL_TOPK_PERCENT": "0.05",
        "VLLM_RETRIEVAL_DENSE_BOUNDARY": "4096",
        "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "8192",
    }
    expected = SparseConfig(256, 1000, 0.05, dense_boundary=4096, offload_boundary=8192)
    assert SparseConfig.from_environment(environment) == expected
    assert SparseConfig.from_environment({}) == SparseConfig()


@pytest.mark.parametrize(("text", "share"), [("20", 0.2), ("0.2", 0.2), ("1", 1.0), ("100", 1.0), ("0", 0.0)])
def test_a_share_above_one_is_a_percentage(text: str, share: float) -> None:
    assert SparseConfig.from_environment({"VLLM_RETRIEVAL_TOPK_PERCENT": text}).topk_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("VLLM_RETRIEVAL_INIT_TOKENS_NUM", "many"),
        ("VLLM_RETRIEVAL_TOPK_PERCENT", "most"),
        ("VLLM_RETRIEVAL_TOPK_PERCENT", "101"),
        ("VLLM_RETRIEVAL_TOPK_PERCENT", "nan"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(variable: str, text: str) -> None:
    with pytest.raises(kv.InvalidArgument, match=f"{variable} is '{text}'"):
        SparseConfig.from_environment({variable: text})


def test_values_that_do_not_go_together_name_the_variables() -> None:
    environment = {"VLLM_RETRIEVAL_INIT_TOKENS_NUM": "100", "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "64"}
    expected = (
        "init_tokens is 100, expected a multiple of block_tokens 128; set by VLLM_RETRIEVAL_INIT_TOKENS_NUM=100, "
    )
    with pytest.raises(kv.InvalidArgument, match=expected + "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM=64"):
        SparseConfig.from_environment(environment)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_tokens", -1),
        ("init_tokens", 100),
        ("local_tokens", 1.5),
        ("topk_share", 1.01),
        ("topk_share", float("nan")),
        ("topk_share", True),
        ("block_tokens", 0),
        ("block_tokens", 256),
        ("dense_boundary", -1),
        ("offload_boundary", 1024),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(kv.InvalidArgument, match=f"{field} is "):
        SparseConfig(**{field: value})  # type: ignore[arg-type]  # that is the test


def test_middle_blocks_are_whole_and_the_budget_is_rounded_up() -> None:
    config = SparseConfig(init_tokens=64, local_tokens=100, topk_share=0.3, block_tokens=32, dense_boundary=0)
    assert [config.middle_blocks(tokens) for tokens in (0, 163, 195, 196, 227, 228)] == [0, 0, 0, 1, 1, 2]
    assert [config.blocks_to_take(blocks) for blocks in (0, 1, 3, 4, 10)] == [0, 1, 1, 2, 3]
    assert SparseConfig(topk_share=0.0).blocks_to_take(1000) == 0
    assert SparseConfig(topk_share=1.0).blocks_to_take(1000) == 1000
