"""Real transformers models that attend by lookup: greedy tokens are those of full attention at a budget of
everything."""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpool_client as kv
from kvpool_sparse import SparseConfig, SparseSequence
from kvpool_sparse.device import DeviceSequence
from tests.rigs.daemon import Daemon
from tests.rigs.late_module import LateModule

if TYPE_CHECKING:
    import transformers
    from transformers import PreTrainedModel

    from kvpool_sparse import transformers_attention
    from kvpool_sparse.transformers_attention import SparseCache
else:
    transformers = LateModule("transformers")
    transformers_attention = LateModule("kvpool_sparse.transformers_attention")

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
}
EVERYTHING = SparseConfig(
    init_tokens=64, local_tokens=96, topk_share=1.0, block_tokens=64, dense_boundary=128, offload_boundary=256
)
NEW_TOKENS = 6


@cache
def model_of(kind: str) -> "PreTrainedModel":
    torch.manual_seed(7)
    model: PreTrainedModel = (
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
        if kind == "qwen2"
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    )
    model.train(False)
    return model


@cache
def scaled_model_of(kind: str) -> "PreTrainedModel":
    """A model whose rotary scaling depends on the length, from 256 tokens on."""
    torch.manual_seed(7)
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half, "original_max_position_embeddings": 256}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | (factors if kind == "longrope" else {})
    sizes = SIZES | {"max_position_embeddings": 1024 if kind == "longrope" else 256}
    model: PreTrainedModel = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    model.train(False)
    return model


def prompt_of(seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 199, (1, tokens), generator=generator)


def generated(
    model: "PreTrainedModel", ids: torch.Tensor, cache: "SparseCache | None", **arguments: object
) -> list[list[int]]:
    with torch.inference_mode():
        generate: Any = model.generate
        out = generate(
            ids,
            attention_mask=arguments.pop("attention_mask", torch.ones_like(ids)),
            cache=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            **arguments,
        )
    return [row.tolist() for row in out[:, ids.shape[1] :]]


@contextlib.contextmanager
def attending(model: "PreTrainedModel") -> Iterator[None]:
    """The model attends by lookup meanwhile."""
    transformers_attention.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(transformers_attention.ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@pytest.fixture(params=["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> "PreTrainedModel":
    """One model for all tests: none changes it for longer than it attends."""
    return model_of(request.param)


@pytest.fixture
def pool(module_daemon: Daemon, model: "PreTrainedModel") -> Iterator[kv.Pool]:
    layout = transformers_attention.layout_of_model(model.config, chunk_tokens=64, dtype="float32")
    with module_daemon.connect(layout=layout, model=model.config.model_type) as connected:
        yield connected


@pytest.mark.parametrize("staging", [{}, {"device": "cpu", "staging_blocks": 30}], ids=["host", "staged"])
@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("qwen2", 700),
        ("llama", 100),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("qwen2", 100), ("llama", 700))),
    ],
    indirect=["model"],
)
def test_greedy_tokens_are_those_of_full_attention(
    model: "PreTrainedModel", pool: kv.Pool, tokens: int, staging: dict[str, Any]
) -> None:
    ids = prompt_of(tokens + len(staging), tokens)
    expected = generated(model, ids, None)
    with attending(model), transformers_attention.SparseCache(pool, EVERYTHING, **staging) as cache:
        assert generated(model, ids, cache) == expected
        row = cache.rows[0]
        assert row.tokens == tokens + NEW_TOKENS - 1
        assert isinstance(row, DeviceSequence) is bool(staging)
        if isinstance(row, DeviceSequence):
            assert (row.stats()["staging_wanted"] > 0) is (tokens == 700)


@pytest.mark.gpu
def test_a_model_on_a_gpu_attends_there(model: "PreTrainedModel", pool: kv.Pool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    if "cache" not in inspect.signature(type(model).forward).parameters:
        pytest.skip("this transformers is older than 5.24")
    ids = prompt_of(700, 700)
    expected = generated(model, ids, None)
    model = copy.deepcopy(model)
    torch.nn.Module.to(model, "cuda")
    with attending(model), transformers_attention.SparseCache(pool, EVERYTHING) as cache:
        assert generated(model, ids.to("cuda"), cache) == expected
        assert isinstance(cache.rows[0], DeviceSequence)
        assert cache.rows[0].device.type == "cuda"


def test_a_step_that_failed_in_the_middle_is_not_repeated(
    model: "PreTrainedModel", pool: kv.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt_of(4, 120)
    with attending(model), transformers_attention.SparseCache(pool, EVERYTHING) as cache, torch.inference_mode():
        model(ids, cache=cache)
        append = SparseSequence.append

        def failing(sequence: SparseSequence, layer: int, k: object, v: object) -> None:
            if layer == 1:
                raise kv.InvalidArgument("odd")
            append(sequence, layer, k, v)

        with monkeypatch.context() as patched:
            patched.setattr(SparseSequence, "append", failing)
            with pytest.raises(kv.InvalidArgument, match="odd"):
                model(ids[:, :1], cache=cache)
        with pytest.raises(kv.InvalidArgument, match="expected the same: a step has failed, begin a new cache"):
            model(ids[:, :1], cache=cache)


def test_a_chunked_prompt_is_the_same_prompt(model: "PreTrainedModel", pool: kv.Pool) -> None:
    ids = prompt_of(3, 500)
    expected = generated(model, ids, None)
    with attending(model), transformers_attention.SparseCache(pool, EVERYTHING) as cache:
        with torch.inference_mode():
            for part in ids.split(170, dim=1)[:-1]:
                model(part, cache=cache)
        assert generated(model, ids, cache) == expected


def test_rows_of_different_lengths_are_dense_and_sparse_side_by_side(model: "PreTrainedModel", pool: kv.Pool) -> None:
    lengths = [70, 300, 240]
    longest = max(lengths)
    rows = [prompt_of(length, length) for length in lengths]
    expected = [generated(model, row, None)[0] for row in rows]
    padded = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    with (
        attending(model),
        transformers_attention.SparseCache(pool, EVERYTHING, rows=3, padding=[longest - n for n in lengths]) as cache,
    ):
        assert generated(model, padded, cache, attention_mask=(padded != 0).long()) == expected
        assert [row.tokens for row in cache.rows] == [length + NEW_TOKENS - 1 for length in lengths]
        assert [row.stats()["recalls"] > 0 for row in cache.rows] == [False, True, True]


def test_a_prompt_that_the_pool_has_is_not_computed_again(model: "PreTrainedModel", pool: kv.Pool) -> None:
    ids = prompt_of(5, 700)
    expected = generated(model, ids, None)
    with attending(model):
        with transformers_attention.SparseCache(pool, EVERYTHING, tokens=ids[0].numpy()) as cache:
            assert generated(model, ids, cache) == expected
            cache.rows[0].settle()
        with transformers_attention.SparseCache(pool, EVERYTHING, tokens=ids[0].numpy()) as again:
            assert again.prefix_tokens >= 512
            assert generated(model, ids, again) == expected
            assert again.rows[0].stats()["summaries_built"] == 0


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_kv_that_depends_on_the_length_is_served_and_not_shared(module_daemon: Daemon, kind: str) -> None:
    """A prompt of more tokens than those that the scaling begins behind has other keys for the same first tokens."""
    scaled = scaled_model_of(kind)
    ids = prompt_of(13, 400)
    expected = generated(scaled, ids, None)
    with pytest.raises(kv.InvalidArgument, match=f"rotary scaling is {kind}.*, expected is_shared=False"):
        transformers_attention.layout_of_model(scaled.config)
    layout = transformers_attention.layout_of_model(scaled.config, chunk_tokens=64, dtype="float32", is_shared=False)
    with module_daemon.connect(layout=layout, model=kind) as pool, attending(scaled):
        with transformers_attention.SparseCache(pool, EVERYTHING) as cache:
            assert generated(scaled, ids, cache) == expected
        rows = [SparseSequence(pool, EVERYTHING, tokens=ids[0].numpy())]
        for shared in (
            transformers_attention.SparseCache(pool, EVERYTHING, tokens=ids[0].numpy()),
            transformers_attention.SparseCache(pool, EVERYTHING, tokens=ids[0].numpy(), device="cpu"),
            transformers_attention.SparseCache.of(rows),
        ):
            with shared, pytest.raises(kv.InvalidArgument, match=f"{kind}.*, expected a cache without tokens"):
                generated(scaled, ids, shared)


@pytest.mark.slow
def test_a_compiled_model_attends_by_lookup(module_daemon: Daemon) -> None:
    model = model_of("llama")
    ids = prompt_of(14, 300)
    expected = generated(model, ids, None)[0][:3]
    layout = transformers_attention.layout_of_model(model.config, chunk_tokens=64, dtype="float32")
    with (
        module_daemon.connect(layout=layout, model="compiled") as pool,
        attending(model),
        transformers_attention.SparseCache(pool, EVERYTHING) as cache,
        torch.inference_mode(),
    ):
        compiled: Any = torch.compile(model, backend="eager")
        try:
            found, step = [], ids
            for _ in expected:
                step = compiled(step, cache=cache).logits[:, -1:].argmax(-1)
                found.append(int(step))
            assert cache.rows[0].stats()["recalls"] > 0
        finally:
            torch._dynamo.reset()
    assert found == expected


def test_forks_answer_questions_on_one_document(model: "PreTrainedModel", pool: kv.Pool) -> None:
    document = prompt_of(6, 600)
    with attending(model), transformers_attention.SparseCache(pool, EVERYTHING) as cache:
        with torch.inference_mode():
            model(document, cache=cache)
        for seed in (11, 12):
            question = torch.cat([document, prompt_of(seed, 20)], dim=1)
            with transformers_attention.SparseCache.of([cache.rows[0].fork()]) as fork:
                found = generated(model, question, fork)
            model.set_attn_implementation("sdpa")
            assert found == generated(model, question, None)
            model.set_attn_implementation(transformers_attention.ATTENTION)


def test_what_it_does_not_compute_is_refused(model: "PreTrainedModel", pool: kv.Pool) -> None:
    ids = prompt_of(8, 80)
    holes = torch.ones_like(ids)
    holes[0, 20:40] = 0
    with attending(model):
        with pytest.raises(kv.InvalidArgument, match="expected a SparseCache"):
            generated(model, ids, None)
        for rows, words, options in (
            (2, "1 rows", {}),
            (1, "attention_mask leaves out", {"attention_mask": holes}),
            (2, "without beams", {"num_beams": 2}),
        ):
            with (
                transformers_attention.SparseCache(pool, EVERYTHING, rows=rows) as cache,
                pytest.raises(kv.InvalidArgument, match=words),
            ):
                generated(model, ids, cache, **options)
        with (
            transformers_attention.SparseCache(pool, EVERYTHING) as cache,
            pytest.raises(kv.InvalidArgument, match="gradients are on"),
        ):
            model(ids, cache=cache)
    with pytest.raises(kv.InvalidArgument, match="padding is"):
        transformers_attention.SparseCache(pool, EVERYTHING, rows=2, padding=[1])
    with SparseSequence(pool, EVERYTHING) as one:
        two = one.fork()
        for layer in range(2):
            two.append(layer, torch.zeros(1, 2, 32), torch.zeros(1, 2, 32))
        with pytest.raises(kv.InvalidArgument, match="same number"):
            transformers_attention.SparseCache.of([one, two])
