"""The part of a lookup's hit that is asked for: clipped to what vLLM can use, and still of the node that a request named."""

import pytest

import kvpool_client as kv
from kvpool.states import Level
from tests.rigs.vllm.request import BLOCK, Request
from tests.rigs.vllm.setting import CHUNK, StartEngine, prompt


@pytest.mark.parametrize("more_tokens", [0, 1])
def test_the_named_node_is_asked_for_a_hit_that_is_clipped(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch, more_tokens: int
) -> None:
    half = start().scheduler._scheduler

    def lookup(keys: kv.KeyChain, owner: str = "") -> kv.Hit:
        return kv.Hit(len(keys), len(keys) * CHUNK, bytes([Level.PEER]) * len(keys), keys, None, owner)

    monkeypatch.setattr(half.pool, "lookup", lookup)
    request = Request("named", prompt(1, 5 * CHUNK + more_tokens), kv_transfer_params={"owner": "elsewhere"})
    half.matched_tokens(request, 0)
    question = half._requests["named"].answer
    assert question is not None
    assert (question.request.owner, question.hit.tokens) == ("elsewhere", 5 * CHUNK - (0 if more_tokens else BLOCK))
