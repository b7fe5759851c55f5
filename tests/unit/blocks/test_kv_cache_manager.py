"""KV cache manager: what TensorRT-LLM's executor, capacity scheduler and model engine ask of it."""

import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import InvalidArgument

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_blocks.executor import CacheType, KVCacheManager, RequestState  # noqa: E402
from tests.rigs.blocks.executor import ScriptedRequest, manager_of  # noqa: E402

pytestmark = pytest.mark.torch


def batch(context: list[Any] = [], generation: list[Any] = []) -> SimpleNamespace:  # noqa: B006 - never changed
    """A scheduled batch."""
    return SimpleNamespace(context_requests=context, generation_requests=generation)


def request_of(number: int, tokens: int, new: int = 8, /, **others: Any) -> ScriptedRequest:
    """A request whose whole prompt is one chunk."""
    request = ScriptedRequest(number, list(range(tokens)), new)
    request.context_chunk_size = tokens
    for name, value in others.items():
        setattr(request, name, value)
    return request


def prefill(manager: KVCacheManager, request: ScriptedRequest) -> None:
    """One step that computes the whole prompt and samples a token."""
    assert manager.prepare_resources(batch([request])) == []
    request.context_current_position = request.cached = request.prompt_len
    request.state = RequestState.GENERATION_IN_PROGRESS
    request.tokens.append(7)
    manager.update_resources(batch([request]))


def decode(manager: KVCacheManager, request: ScriptedRequest, drafts: int = 0, accepted: int = 0) -> None:
    """One step that verifies drafts and samples a token."""
    request.py_draft_tokens = [5] * drafts
    assert manager.prepare_resources(batch([], [request])) == []
    request.py_rewind_len = drafts - accepted
    request.tokens += [5] * accepted + [7]
    manager.update_resources(batch([], [request]))


def test_a_request_that_ends_in_its_step_leaves_what_it_computed_and_a_cancelled_one_does_not() -> None:
    manager = manager_of(80)
    for state, reused in ((RequestState.CONTEXT_INIT, 0), (RequestState.GENERATION_COMPLETE, 11)):
        request = request_of(1, 12)
        manager.prepare_resources(batch([request]))
        assert request.reused == 0
        request.state = state
        manager.free_resources(request)
        manager.update_resources(batch([request]))
        manager.free_resources(request)
        again = request_of(2, 12)
        manager.prepare_resources(batch([again]))
        assert again.reused == reused
        manager.free_resources(again)
    assert manager.get_num_free_blocks() == manager.get_max_resource_count()


def test_rejected_drafts_are_taken_back() -> None:
    manager = manager_of(80)
    request = request_of(1, 6)
    prefill(manager, request)
    decode(manager, request, drafts=6, accepted=1)
    assert len(manager.get_cache_indices(request)) == 2
    decode(manager, request, drafts=3, accepted=3)
    assert len(manager.get_cache_indices(request)) == 3
    assert manager.verify() == []
    manager.rewind_kv_cache(request, 5)
    assert len(manager.get_cache_indices(request)) == 2
    assert manager.verify() == []


def test_kv_of_a_token_that_is_sampled_and_not_computed_is_not_reusable() -> None:
    manager = manager_of(80)
    request = request_of(1, 5)
    prefill(manager, request)
    for _ in range(3):
        assert manager.prepare_resources(batch([], [request])) == []
    request.tokens.append(8)
    manager.update_resources(batch([], [request]))
    decode(manager, request)
    manager.free_resources(request)
    following = request_of(2, 9, tokens=[*request.tokens, 9])
    assert following.tokens == [0, 1, 2, 3, 4, 7, 8, 7, 9]
    assert manager.prepare_resources(batch([following])) == []
    assert following.reused == 7


def test_without_room_a_request_is_returned_and_keeps_what_it_has() -> None:
    manager = manager_of(12)
    first, second = request_of(1, 8), request_of(2, 8, tokens=[9] * 8)
    prefill(manager, first)
    assert manager.prepare_resources(batch([second])) == [second]
    for _ in range(4):
        decode(manager, first)
    assert manager.prepare_resources(batch([], [first])) == [first]
    manager.update_resources(batch([], [first]))
    assert len(manager.get_cache_indices(first)) == 3
    assert manager.verify() == []


@pytest.mark.parametrize(("prompt", "new", "blocks"), [(1, 1, 1), (4, 1, 2), (7, 1, 2), (8, 8, 4), (9, 8, 5)])
def test_what_a_request_needs_to_completion_counts_what_it_has(prompt: int, new: int, blocks: int) -> None:
    manager = manager_of(400)
    request = request_of(1, prompt, new)
    assert manager.get_needed_resource_to_completion(request) == blocks
    prefill(manager, request)
    assert manager.get_needed_resource_to_completion(request) == blocks
    # As TensorRT-LLM counts: whole blocks of the prompt, and the rest with the output rounded up.
    whole = prompt // 4
    assert blocks == whole + -(-(prompt + new - whole * 4) // 4)


def test_block_ids_come_by_request_and_in_order() -> None:
    manager = manager_of(80)
    first, second = request_of(11, 9), request_of(5, 3)
    prefill(manager, first)
    prefill(manager, second)
    ids = manager.get_batch_cache_indices([5, 11, 5])
    assert ids == [manager.get_cache_indices(request) for request in (second, first, second)]
    padded = manager.get_block_ids_per_seq([5, 11])
    assert padded.dtype == torch.int32
    assert padded.tolist() == [[*ids[0], 0, 0], ids[1]]
    assert manager.get_last_block_id(11) == padded[1].tolist()[-1]


def test_block_ids_of_requests_come_by_their_ids() -> None:
    manager = manager_of(80)
    first, second = request_of(11, 9), request_of(5, 3)
    prefill(manager, first)
    prefill(manager, second)
    ids = manager.get_batch_cache_indices([second, first], layer_idx=1)
    assert ids == {5: manager.get_cache_indices(second), 11: manager.get_cache_indices(first)}
    for entries, words in (
        ([5, first], "request_ids has ids and requests, expected one of both"),
        ([5, 6], "request 6 is not allocated"),
        ([first, request_of(6, 3)], "request 6 is not allocated"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            manager.get_batch_cache_indices(entries)


def test_buffers_have_the_engines_shapes() -> None:
    manager = manager_of(
        80, num_layers=4, num_kv_heads=5, mapping=SimpleNamespace(tp_size=2, pp_layers=lambda _: [2, 3])
    )
    assert manager.get_buffers(2).shape == (20, 2, 4, 3, 8)
    turned = manager.get_buffers(3, kv_layout="HND")
    assert turned.shape == (20, 2, 3, 4, 8)
    turned[1, 0, 2, 3] = 9
    assert (manager.get_buffers(3)[1, 0, 3, 2] == 9).all()
    with pytest.raises(InvalidArgument, match=r"layer_idx is 1, expected one of this rank's \[2, 3\]"):
        manager.get_buffers(1)


def test_dummy_requests_have_blocks_and_are_never_reused() -> None:
    manager = manager_of(40)
    prefill(manager, request_of(1, 8, tokens=[1] * 8))
    before = manager.get_num_free_blocks()
    requests = manager.add_dummy_requests([70, 71], [9, 2], is_gen=True, max_num_draft_tokens=2)
    assert requests is not None
    assert [(entry.prompt_len, len(manager.get_cache_indices(entry))) for entry in requests] == [(8, 3), (1, 1)]
    assert all(entry.is_dummy_request and len(entry.py_draft_tokens) == 2 for entry in requests)
    manager.prepare_resources(batch([], list(requests)))
    manager.update_resources(batch([], list(requests)))
    for entry in requests:
        manager.free_resources(entry)
    assert manager.get_num_free_blocks() == before
    padding = manager.add_padding_request(99)
    assert padding is not None
    assert padding.context_current_position == 0
    assert len(manager.get_cache_indices(padding)) == 1


def test_dummy_requests_without_room_are_none_and_take_nothing() -> None:
    manager = manager_of(16)
    assert manager.add_dummy_requests([1, 2], [8, 12]) is None
    assert manager.get_num_free_blocks() == 4
    assert manager.add_dummy_requests([1], [16]) is not None
    assert manager.add_dummy_requests([2], [1], prepare_resource=False) is None
    assert manager.add_padding_request(2) is None


@pytest.mark.parametrize(
    ("ids", "tokens", "others", "words"),
    [
        ([70, 70], [9, 9], {}, "request 70 is allocated already"),
        ([70, 1], [9, 9], {}, "request 1 is allocated already"),
        ([70, 71], [9], {}, "have 2 and 1 entries, expected the same"),
        ([70, 71], [9, 0], {}, "request 71 has no tokens"),
        ([70, 71], [9, 9], {"num_extra_decoding_steps": -1}, "tokens is -1, expected a number from 0"),
    ],
)
def test_dummy_requests_that_are_refused_take_nothing(
    ids: list[int], tokens: list[int], others: dict[str, Any], words: str
) -> None:
    manager = manager_of(80)
    prefill(manager, request_of(1, 8))
    before = manager.get_num_free_blocks()
    with pytest.raises(InvalidArgument, match=words):
        manager.add_dummy_requests(ids, tokens, **others)
    assert manager.get_num_free_blocks() == before
    assert manager.blocks.stats()["requests"] == 1
    assert manager.verify() == []


def test_salts_adapters_and_multimodal_content_separate_prefixes() -> None:
    manager = manager_of(400)
    terms: list[dict[str, Any]] = [
        {},
        {"cache_salt_id": 1},
        {"cache_salt_id": 2},
        {"lora_task_id": 1},
        {"lora_task_id": 2},
    ]
    for number, term in enumerate(terms):
        for again in (0, 1):
            request = request_of(10 * number + again, 12, **term)
            prefill(manager, request)
            assert request.reused == (11 if again else 0), term
    for number in (70, 71):
        request = request_of(number, 12, multimodal_hashes=[[1, 2]])
        prefill(manager, request)
        assert request.reused == 0
        manager.free_resources(request)
    other = request_of(71, 12, multimodal_hashes=[[3, 4]])
    prefill(manager, other)
    assert other.reused == 0


def test_retention_is_that_of_the_requests_config() -> None:
    manager = manager_of(80)
    ranges = [SimpleNamespace(token_start=0, token_end=4, priority=80, duration_ms=timedelta(seconds=3))]
    config = SimpleNamespace(
        token_range_retention_configs=ranges, decode_retention_priority=20, decode_duration_ms=None
    )
    request = request_of(1, 8, kv_cache_retention_config=config)
    prefill(manager, request)
    for _ in range(4):
        decode(manager, request)
    priorities = [manager.get_priority_by_block_id(block) for block in manager.get_cache_indices(request)]
    assert priorities == [80, 35, 20]
    assert manager.get_priority_by_block_id(19) == 35


def test_without_block_reuse_nothing_is_kept() -> None:
    config = SimpleNamespace(max_tokens=80, enable_block_reuse=False)
    manager = KVCacheManager(
        config,
        CacheType.SELF,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        tokens_per_block=4,
        max_seq_len=64,
        max_batch_size=4,
        mapping=SimpleNamespace(tp_size=1),
        device="cpu",
    )
    for number in (1, 2):
        request = request_of(number, 12)
        prefill(manager, request)
        assert request.reused == 0
        manager.free_resources(request)
    assert manager.blocks.stats()["tree_blocks"] == 0


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"max_beam_width": 4}, "max_beam_width is 4, expected 1"),
        ({"spec_config": object()}, "spec_config is <object"),
        ({"is_draft": True}, "is_draft is True"),
        ({"num_kv_heads": [1, 2]}, r"num_kv_heads is \[1, 2\]"),
        ({"dtype": "NVFP4"}, "dtype is 'NVFP4'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(others: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        manager_of(40, **others)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_tokens": 3}, "max_tokens is 3, room for 0 blocks"),
        ({"max_tokens": None}, "max_tokens is None, expected a number on the device cpu"),
        ({"max_tokens": 64, "max_attention_window": [512]}, r"max_attention_window is \[512\]"),
        ({"max_tokens": 64, "sink_token_length": 4}, "sink_token_length is 4"),
        ({"max_tokens": 64, "enable_partial_reuse": False}, "enable_partial_reuse is False"),
        ({"max_tokens": 64, "host_cache_size": 1 << 30}, "host_cache_size is 1073741824"),
    ],
)
def test_settings_that_a_block_pool_has_not_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "tokens_per_block": 4}
    with pytest.raises(InvalidArgument, match=words):
        KVCacheManager(
            SimpleNamespace(**config),
            CacheType.SELF,
            max_seq_len=4096,
            max_batch_size=1,
            mapping=SimpleNamespace(tp_size=1),
            device="cpu",
            **arguments,
        )


def test_other_kinds_of_cache_and_wide_beams_are_refused() -> None:
    manager = manager_of(40)
    with pytest.raises(InvalidArgument, match=r"kv_cache_type is <CacheType.CROSS"):
        KVCacheManager(
            SimpleNamespace(max_tokens=64),
            CacheType.CROSS,
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            tokens_per_block=4,
            max_seq_len=64,
            max_batch_size=1,
            mapping=None,
            device="cpu",
        )
    with pytest.raises(InvalidArgument, match="pin_on_release is True"):
        manager.free_resources(request_of(1, 4), pin_on_release=True)


def retention_of(milliseconds: object, priority: object = 80) -> SimpleNamespace:
    """A KvCacheRetentionConfig that keeps the first four tokens."""
    entry = SimpleNamespace(token_start=0, token_end=4, priority=priority, duration_ms=milliseconds)
    return SimpleNamespace(
        token_range_retention_configs=[entry], decode_retention_priority=None, decode_duration_ms=None
    )


def raising(error: Exception) -> Callable[..., Any]:
    """A request's method that fails."""

    def fail(*_: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (
            {"kv_cache_retention_config": retention_of(timedelta(0))},
            r"retention\[0\].duration_s is 0.0, expected None or",
        ),
        (
            {"kv_cache_retention_config": retention_of(timedelta(days=60))},
            "duration_s is 5184000.0, .* at most 4294967",
        ),
        ({"kv_cache_retention_config": retention_of("soon")}, "TypeError: "),
        ({"kv_cache_retention_config": retention_of(None, 101)}, "priority is 101, expected 0..100"),
        ({"kv_cache_retention_config": SimpleNamespace()}, "AttributeError: "),
        ({"sampling_config": SimpleNamespace(beam_width=2)}, "the beam width is 2, expected 1"),
        ({"tokens": [1.5] * 9}, "expected one dimension of integers"),
        ({"tokens": [1] * 8}, "prompt_len is 9 with 8 tokens"),
        ({"set_prepopulated_prompt_len": None}, "TypeError: 'NoneType' object is not callable"),
        ({"context_current_position": 4}, "py_request_id is 1, expected a request with blocks"),
        ({"py_draft_tokens": [1] * 56}, "positions are 65, expected at most max_seq_len 64"),
        ({"prompt_len": -1}, "prompt_len is -1, expected a number of tokens from 0"),
        ({"prompt_len": 4.0}, "prompt_len is 4.0, expected a number of tokens from 0"),
        ({"context_chunk_size": 5.0}, "context_chunk_size is 5.0, expected a number of tokens from 0"),
        ({"context_chunk_size": -4}, "context_chunk_size is -4, expected a number of tokens from 0"),
        ({"get_tokens": raising(RuntimeError("TLLM_CHECK failed"))}, "RuntimeError: TLLM_CHECK failed"),
        ({"get_tokens": raising(AssertionError("one beam"))}, "AssertionError: one beam"),
        ({"set_prepopulated_prompt_len": raising(RuntimeError("no context"))}, "RuntimeError: no context"),
        ({"set_prepopulated_prompt_len": raising(AssertionError("no context"))}, "AssertionError: no context"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_a_reason_and_the_others_are_prepared(
    odd: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(160, max_seq_len=64)
    generating = request_of(9, 6)
    prefill(manager, generating)
    before = manager.get_num_free_blocks()
    refused = request_of(1, 9, **odd)
    for step in range(3):
        served = request_of(2, 8, tokens=[90 + step] * 8)
        assert manager.prepare_resources(batch([refused, served], [generating])) == [refused]
        assert list(manager.refusals) == [1]
        assert re.search(reason, manager.refusals[1])
        assert served.reused == 0
        assert len(manager.get_cache_indices(generating)) == 2 + (step > 1)
        served.context_current_position = 8
        generating.tokens.append(7)
        manager.update_resources(batch([refused, served], [generating]))
        assert manager.verify() == []
        manager.free_resources(served)
    assert manager.get_num_free_blocks() == before - 1
    assert len([record for record in caplog.records if "request 1 is refused" in record.getMessage()]) == 1
    assert manager.prepare_resources(batch([request_of(1, 9)], [generating])) == []
    assert manager.refusals == {}


@pytest.mark.parametrize("state", [RequestState.CONTEXT_INIT, RequestState.GENERATION_IN_PROGRESS])
def test_a_request_whose_id_is_no_key_is_refused_by_the_ids_repr(state: RequestState) -> None:
    manager = manager_of(80)
    odd, other = request_of(1, 6, py_request_id=[1], state=state), request_of(2, 8, tokens=[3] * 8)
    both = batch([odd, other]) if state == RequestState.CONTEXT_INIT else batch([other], [odd])
    assert manager.prepare_resources(both) == [odd]
    assert list(manager.refusals) == ["[1]"]
    assert re.search(r"unhashable type: 'list'|py_request_id is \[1\], expected", manager.refusals["[1]"])
    other.context_current_position = 8
    manager.update_resources(both)
    manager.free_resources(odd)
    assert manager.blocks.priority_of(manager.get_cache_indices(other)[1]) is not None
    assert manager.get_num_free_blocks() == manager.get_max_resource_count() - 2
    assert manager.verify() == []


def test_a_failed_assertion_of_the_pool_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(80)
    request, odd = request_of(1, 6), request_of(2, 6, get_tokens=raising(AssertionError("one beam")))
    prefill(manager, request)
    monkeypatch.setattr(manager._served[1], "positions", 9)
    assert manager.verify() == ["request 1 has 9 positions in room for 8"]
    with pytest.raises(AssertionError, match="one beam"):
        manager.prepare_resources(batch([odd]))


def test_an_unknown_generating_request_is_refused_and_the_others_have_their_room() -> None:
    manager = manager_of(80)
    known, unknown = request_of(1, 8), request_of(2, 8)
    prefill(manager, known)
    assert manager.prepare_resources(batch([], [unknown, known])) == [unknown]
    assert manager.refusals == {2: "py_request_id is 2, expected a request with blocks: after its first context chunk"}
    assert len(manager.get_cache_indices(known)) == 3
    with pytest.raises(InvalidArgument, match="py_request_id is 2, expected a request with blocks"):
        manager.rewind_kv_cache(unknown, 1)


@pytest.mark.parametrize("rewound", [9, -1, "two", RuntimeError("TLLM_CHECK failed"), AssertionError("one beam")])
def test_a_step_that_cannot_be_confirmed_ends_its_request_alone(rewound: Any) -> None:
    manager = manager_of(80)
    odd, other = request_of(1, 6), request_of(2, 6, tokens=[3] * 6)
    prefill(manager, odd)
    prefill(manager, other)
    odd.py_draft_tokens = other.py_draft_tokens = [5]
    assert manager.prepare_resources(batch([], [odd, other])) == []
    if isinstance(rewound, Exception):
        odd.get_tokens = raising(rewound)  # type: ignore[method-assign]  # a request that is odd
    else:
        odd.py_rewind_len = rewound
    odd.tokens += [5, 7]
    other.tokens += [5, 7]
    manager.update_resources(batch([], [odd, other]))
    assert manager.get_priority_by_block_id(manager.get_cache_indices(other)[1]) == 35
    assert manager.blocks.priority_of(manager.get_cache_indices(other)[1]) is not None
    assert manager.blocks.priority_of(manager.get_cache_indices(odd)[1]) is None
    assert manager.prepare_resources(batch([], [odd, other])) == [odd]
    assert manager.refusals[1].startswith("its last step was not confirmed: ")
    manager.free_resources(odd)
    assert manager.verify() == []


def test_no_request_is_longer_than_max_seq_len() -> None:
    manager = manager_of(160, max_seq_len=10)
    assert (manager.max_seq_len, manager.max_batch_size) == (10, 8)
    longer = request_of(1, 11)
    assert manager.prepare_resources(batch([longer])) == [longer]
    assert manager.refusals == {1: "positions are 11, expected at most max_seq_len 10"}
    request = request_of(2, 9)
    prefill(manager, request)
    decode(manager, request)
    assert manager.prepare_resources(batch([], [request])) == [request]
    assert manager.refusals == {2: "positions are 11, expected at most max_seq_len 10"}
    with pytest.raises(InvalidArgument, match="positions are 11, expected at most max_seq_len 10"):
        manager.add_dummy_requests([3], [11])
    assert manager.verify() == []


def test_a_request_that_all_blocks_are_too_few_for_is_refused_with_the_reason_and_dummies_are_none() -> None:
    manager = manager_of(12)
    longer = request_of(1, 13)
    assert manager.prepare_resources(batch([longer])) == [longer]
    assert manager.refusals[1].startswith("request 1 needs 4 blocks for 13 tokens, expected at most num_blocks 3")
    request = request_of(2, 12)
    prefill(manager, request)
    assert manager.prepare_resources(batch([], [request])) == [request]
    assert manager.refusals[2].startswith("request 2 needs 4 blocks for 13 tokens, expected at most num_blocks 3")
    manager.free_resources(request)
    assert manager.add_dummy_requests([3], [13]) is None
    assert manager.add_dummy_requests([3], [12], num_extra_decoding_steps=1) is None
    assert manager.get_num_free_blocks() == 3
    assert manager.verify() == []


def test_no_batch_has_more_than_max_batch_size_requests() -> None:
    manager = manager_of(160, max_batch_size=2)
    generating = request_of(1, 4)
    prefill(manager, generating)
    odd = request_of(2, 4, sampling_config=SimpleNamespace(beam_width=2))
    third, fourth = request_of(3, 4), request_of(4, 4)
    assert manager.prepare_resources(batch([odd, third, fourth], [generating])) == [odd, generating]
    assert manager.refusals[1] == "it is one more than max_batch_size 2"
    manager.update_resources(batch([third, fourth]))
    assert manager.prepare_resources(batch([], [generating])) == []
    with pytest.raises(InvalidArgument, match="have 3 and 3 entries, expected the same, at most max_batch_size 2"):
        manager.add_dummy_requests([5, 6, 7])


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_bounds_that_are_no_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value!r}, expected a number from 1"):
        manager_of(40, 4, **{name: value})


def test_without_cuda_the_device_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert manager_of(40, device=None).get_buffers(0).device.type == "cpu"
    for device in ("cuda:99", torch.device("cuda", 99), "gpu"):
        with pytest.raises(InvalidArgument, match=f"device is '{device}', expected one that torch has here: "):
            manager_of(40, device=device)


@pytest.mark.parametrize(("dtype", "name"), [("HALF", "float16"), ("BF16", "bfloat16"), ("FP8", "float8_e4m3fn")])
def test_data_types_are_those_of_tensorrt_llm_or_torch(dtype: str, name: str) -> None:
    for given in (SimpleNamespace(name=dtype), getattr(torch, name), name):
        assert manager_of(40, dtype=given).get_buffers(0).dtype == getattr(torch, name)
