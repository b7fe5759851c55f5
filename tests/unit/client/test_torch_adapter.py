"""The torch adapter over a fake pool: what is restored, what is left to compute, and what happens when less comes."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from tests.rigs.fake_pool import AWAY, FakePool

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from kvpool_client.torch import (  # noqa: E402 - only where torch is there
    PagedPrefixCache,
    PrefixShortened,
    announced,
    gated,
    layout_of,
)

pytestmark = pytest.mark.torch

CHUNK, BLOCK, LAYERS, BLOCKS = 32, 8, 4, 64


def _layers(form: str = "kv_first") -> list[Any]:
    axes = (2, BLOCKS) if form == "kv_first" else (BLOCKS, 2)
    return [torch.randn(*axes, BLOCK, 2, 16) for _ in range(LAYERS)]


@pytest.fixture
def pool() -> Iterator[FakePool]:
    fake = FakePool(layout_of(_layers(), CHUNK))
    yield fake
    assert fake.open_leases == 0
    fake.close()


def _prefix(pool: FakePool, layers: list[Any]) -> PagedPrefixCache:
    return PagedPrefixCache(cast(kv.Pool, pool), layers, BLOCK)


def _tokens(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(1).integers(0, 1000, count).tolist()
    return tokens


def _table(seed: int, count: int = 40) -> Any:
    return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed))[:count]


def _stored(pool: FakePool, tokens: list[int]) -> tuple[list[Any], Any]:
    """An engine's layers and block table, whose KV for `tokens` is in the pool."""
    layers, table = _layers(), _table(1)
    assert _prefix(pool, layers).store(tokens, table).commit().stored == len(tokens) // CHUNK
    return layers, table


def test_the_layout_is_read_from_the_tensors() -> None:
    assert layout_of(_layers("block_first"), 64) == kv.Layout(LAYERS, 2, 16, "float32", 64)
    latent = [torch.zeros(8, BLOCK, 576, dtype=torch.bfloat16) for _ in range(2)]
    assert layout_of(latent, 64, rank=1, world=2) == kv.Layout(2, 1, 576, "bfloat16", 64, planes=1, rank=1, world=2)


@pytest.mark.parametrize("layers", [[], [torch.zeros(4, 4)]])
def test_tensors_of_another_form_have_no_layout(layers: list[Any]) -> None:
    with pytest.raises(kv.LayoutMismatch, match="expected"):
        layout_of(layers)


def test_tensors_that_do_not_fit_the_layout_are_refused(pool: FakePool) -> None:
    with pytest.raises(kv.LayoutMismatch, match="layer"):
        _prefix(pool, _layers()[1:])


@pytest.mark.parametrize(
    ("stored", "named", "is_taken"),
    [
        ("bfloat16", "bfloat16", True),
        ("bfloat16", "float16", False),  # as many bytes, other numbers
        ("float16", "bfloat16", False),
        ("bfloat16", "uint16", True),  # its bits
        ("bfloat16", "int16", False),
        ("float8_e4m3fn", "float8_e4m3fn", True),
        ("float8_e4m3fn", "float8_e5m2", False),
        ("float8_e4m3fn", "float8_e4m3fnuz", False),
        ("float8_e4m3fn", "uint8", True),
        ("float32", "complex32", False),
    ],
)
def test_tensors_are_of_the_layouts_dtype_or_its_bits(stored: str, named: str, is_taken: bool) -> None:
    layout = kv.Layout(LAYERS, 2, 16, stored, CHUNK)
    with contextlib.suppress(UserWarning):  # of torch, at the first complex32 of a process
        torch.empty(0, dtype=torch.complex32)
    layers = [torch.empty(2, BLOCKS, BLOCK, 2, 16, dtype=getattr(torch, named)) for _ in range(LAYERS)]
    with kv.connect(AWAY, model="fake", revision="1", layout=layout) as pool:
        if is_taken:
            assert pool.register(layers, BLOCK).blocks == BLOCKS
        else:
            with pytest.raises(kv.LayoutMismatch, match=f"items are {named}, expected the layout's {stored}, or uint"):
                pool.register(layers, BLOCK)


def test_tensors_without_memory_are_refused() -> None:
    layers = [torch.empty(2, BLOCKS, BLOCK, 2, 16, device="meta") for _ in range(LAYERS)]
    with (
        kv.connect(AWAY, model="fake", revision="1", layout=layout_of(layers, CHUNK)) as pool,
        pytest.raises(kv.InvalidArgument, match="layer 0 is on meta, expected host memory or a CUDA device"),
    ):
        pool.register(layers, BLOCK)


def test_kv_heads_as_many_as_block_tokens_need_the_form_of_the_helper() -> None:
    layers = [torch.zeros(2, BLOCKS, BLOCK, BLOCK, 16) for _ in range(LAYERS)]
    fake = cast(kv.Pool, FakePool(layout_of(layers, CHUNK)))
    with pytest.raises(kv.LayoutMismatch, match=r"as \[heads, tokens, dim\]: pass form='kv_first'"):
        PagedPrefixCache(fake, layers, BLOCK)
    assert "kv_first" in repr(PagedPrefixCache(fake, layers, BLOCK, form="kv_first"))
    fake.close()


def test_an_empty_pool_restores_nothing(pool: FakePool) -> None:
    with _prefix(pool, _layers()).restore(_tokens(100), _table(1)) as restored:
        assert restored.tokens == 0
        assert restored.wait_layer(0)
        assert restored.prefill(lambda start: start) == 0
    assert pool.loads == []


def test_an_empty_prompt_restores_nothing(pool: FakePool) -> None:
    with _prefix(pool, _layers()).restore([], []) as restored:
        assert restored.tokens == 0


@pytest.mark.parametrize("form", ["kv_first", "block_first"])
def test_stored_kv_is_restored_into_other_blocks(pool: FakePool, form: str) -> None:
    tokens = _tokens(5 * CHUNK + 3)
    layers, table = _stored(pool, tokens)
    target, other = _layers(form), _table(2)
    with _prefix(pool, target).restore(torch.tensor(tokens), other.tolist()) as restored:
        assert restored.tokens == 5 * CHUNK
        for number in range(LAYERS):
            assert restored.wait_layer(number)
            planes = target[number] if form == "kv_first" else target[number].transpose(0, 1)
            assert torch.equal(planes[:, other[:20]], layers[number][:, table[:20]])
    assert restored.reason == "complete"


@pytest.mark.parametrize("more", [0, 1])
def test_one_token_is_always_left_to_compute(pool: FakePool, more: int) -> None:
    tokens = _tokens(4 * CHUNK + more)
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        assert restored.tokens == (4 if more else 3) * CHUNK


def test_held_tokens_are_not_loaded_again(pool: FakePool) -> None:
    tokens = _tokens(4 * CHUNK + 1)
    layers, table = _stored(pool, tokens)
    target, other = _layers(), _table(2)
    before = target[0].clone()
    held = CHUNK + 2 * BLOCK
    with _prefix(pool, target).restore(tokens, other, held) as restored:
        assert restored.tokens == 4 * CHUNK
        assert all(restored.wait_layer(number) for number in range(LAYERS))
    first = held // BLOCK
    assert torch.equal(target[0][:, other[:first]], before[:, other[:first]])
    assert torch.equal(target[0][:, other[first:16]], layers[0][:, table[first:16]])


def test_nothing_is_leased_when_the_engine_holds_more(pool: FakePool) -> None:
    tokens = _tokens(4 * CHUNK + 1)
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2), 4 * CHUNK) as restored:
        assert restored.tokens == 4 * CHUNK
    assert pool.loads == []


@pytest.mark.parametrize("held", [3, -BLOCK, 5 * CHUNK])
def test_held_tokens_that_are_not_whole_blocks_are_refused(pool: FakePool, held: int) -> None:
    with pytest.raises(kv.InvalidArgument, match="held_tokens"):
        _prefix(pool, _layers()).restore(_tokens(5 * CHUNK), _table(1), held)


@pytest.mark.parametrize("held", [3.0, 8.0, "8"])
def test_held_tokens_that_are_no_number_of_tokens_are_refused(pool: FakePool, held: Any) -> None:
    with pytest.raises(kv.InvalidArgument, match=f"held_tokens is {held!r}"):
        _prefix(pool, _layers()).restore(_tokens(5 * CHUNK), _table(1), held)


@pytest.mark.parametrize("verb", ["restore", "store"])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda table: table.double(), "float64, expected one dimension of integers"),
        (lambda table: table + 0.5, "float32, expected one dimension of integers"),
        (
            lambda table: table[None],
            r"shape \(1, 40\) of int64, expected one dimension of integers: pass block_ids\[0\]",
        ),
        (lambda table: table.index_fill(0, torch.tensor([7]), -1), r"block_ids\[7\] is -1, expected 0\.\.63$"),
        (
            lambda table: table.index_fill(0, torch.tensor([7]), int(table[2])),
            r"block_ids\[2\] and block_ids\[7\] are both",
        ),
        (lambda table: table.index_fill(0, torch.tensor([7]), BLOCKS), r"block_ids\[7\] is 64, expected 0\.\.63$"),
    ],
    ids=["floats", "fractions", "a batch", "-1", "a block twice", "no such block"],
)
def test_a_block_table_that_cannot_be_meant_is_refused_whatever_is_stored(
    pool: FakePool, verb: str, is_stored: bool, change: Any, named: str
) -> None:
    tokens = _tokens(4 * CHUNK + 1)
    if is_stored:
        _stored(pool, tokens)
    with pytest.raises(kv.InvalidArgument, match=named):
        getattr(_prefix(pool, _layers()), verb)(tokens, change(_table(1)))
    assert pool.loads == []


def test_what_fills_a_block_table_behind_the_full_chunks_is_not_looked_at(pool: FakePool) -> None:
    tokens = _tokens(4 * CHUNK + 1)
    _, table = _stored(pool, tokens)
    table[16:] = -1
    assert _prefix(pool, _layers()).store(tokens, table).commit().present == 4
    with _prefix(pool, _layers()).restore(tokens, table) as restored:
        assert restored.settle() == 4 * CHUNK


@pytest.mark.parametrize("tokens", [torch.zeros(1, 100, dtype=torch.int64), [[0] * 100], np.zeros((1, 100), np.int32)])
def test_a_batch_of_one_prompt_is_refused_alike_everywhere(pool: FakePool, tokens: Any) -> None:
    """`restore` took [1, n] for a prompt of one token, which is a miss."""
    prefix, chain = _prefix(pool, _layers()), pool.keys([])
    for verb in (
        partial(prefix.restore, tokens, _table(1)),
        partial(prefix.store, tokens, _table(1)),
        partial(pool.keys, tokens),
    ):
        with pytest.raises(kv.InvalidArgument, match=r"tokens have shape \(1, 100\) of .*: pass tokens\[0\]$"):
            verb()
    with pytest.raises(kv.InvalidArgument, match=r"pass tokens\[0\]$"):
        chain.extend(tokens)
    assert prefix.restore(tokens[0], _table(1)).tokens == 0


def test_a_short_block_table_is_refused(pool: FakePool) -> None:
    prefix = _prefix(pool, _layers())
    with pytest.raises(kv.InvalidArgument, match="at least 8"):
        prefix.restore(_tokens(2 * CHUNK + 1), _table(1, 7))
    with pytest.raises(kv.InvalidArgument, match="at least 8"):
        prefix.store(_tokens(2 * CHUNK), _table(1, 7))


def test_a_lease_that_comes_back_empty_restores_nothing(pool: FakePool) -> None:
    tokens = _tokens(3 * CHUNK)
    _stored(pool, tokens)
    pool.lose_leases = True
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        assert restored.tokens == 0


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_shorter_load_is_reported_once_with_its_first_missing_token(pool: FakePool, layer: int, chunk: int) -> None:
    tokens = _tokens(5 * CHUNK + 1)
    layers, table = _stored(pool, tokens)
    pool.fail_at = (chunk, layer)
    target, other = _layers(), _table(2)
    with _prefix(pool, target).restore(tokens, other) as restored:
        assert [restored.wait_layer(number) for number in range(layer + 1)] == [True] * layer + [False]
        assert (restored.tokens, restored.reason) == (chunk * CHUNK, "checksum")
        assert all(restored.wait_layer(number) for number in range(LAYERS))
    blocks = chunk * CHUNK // BLOCK
    for source, copy in zip(layers, target, strict=True):
        assert torch.equal(copy[:, other[:blocks]], source[:, table[:blocks]])


def test_a_shorter_load_never_ends_before_the_tokens_that_the_engine_holds(pool: FakePool) -> None:
    tokens = _tokens(5 * CHUNK + 1)
    _stored(pool, tokens)
    pool.fail_at, pool.fail_reason = (0, 1), "gone"
    held = CHUNK + BLOCK
    with _prefix(pool, _layers()).restore(tokens, _table(2), held) as restored:
        assert not all(restored.wait_layer(number) for number in range(2))
        assert (restored.tokens, restored.reason) == (held, "gone")


def test_prefill_runs_again_from_the_right_token(pool: FakePool) -> None:
    tokens = _tokens(5 * CHUNK + 1)
    _stored(pool, tokens)
    pool.fail_at = (3, 2)
    modules = [torch.nn.Identity() for _ in range(LAYERS)]
    model = torch.nn.Sequential(*modules)
    starts = []

    def forward(start: int) -> int:
        starts.append(start)
        model(torch.zeros(1))
        return start

    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored, gated(restored, modules):
        assert restored.prefill(forward) == 3 * CHUNK
    assert starts == [5 * CHUNK, 3 * CHUNK]
    model(torch.zeros(1))


def test_a_gated_module_does_not_run_on_missing_kv(pool: FakePool) -> None:
    tokens = _tokens(2 * CHUNK + 1)
    _stored(pool, tokens)
    pool.fail_at = (1, 0)
    module = torch.nn.Linear(1, 1)
    restored = _prefix(pool, _layers()).restore(tokens, _table(2))
    ended = pytest.raises(PrefixShortened, match="layer 0 ended at token 32: checksum")
    with restored, gated(restored, [module]), ended:
        module(torch.zeros(1))
    module(torch.zeros(1))


def test_an_exception_cancels_the_load_and_releases_the_lease(pool: FakePool) -> None:
    tokens = _tokens(2 * CHUNK + 1)
    _stored(pool, tokens)
    restored = _prefix(pool, _layers()).restore(tokens, _table(2))
    with pytest.raises(KeyError), restored:
        raise KeyError("the engine's own")
    assert (pool.loads[0].reason, restored.tokens, pool.open_leases) == ("cancelled", 0, 0)


def test_layers_are_announced_as_their_modules_have_run(pool: FakePool) -> None:
    layers, tokens = _layers(), _tokens(2 * CHUNK)
    save = _prefix(pool, layers).store(tokens, _table(1))
    modules = [torch.nn.Identity() for _ in range(LAYERS)]
    with announced(save, modules):
        for number, module in enumerate(modules):
            assert pool.saves[0].announced == list(range(number))
            layers[number].fill_(number)
            module(torch.zeros(1))
    modules[0](torch.zeros(1))
    assert save.commit().stored == 2
    assert all((parts[number] == number).all() for parts in pool.stored.values() for number in range(LAYERS))


def test_an_exception_while_announcing_aborts_the_save(pool: FakePool) -> None:
    save = _prefix(pool, _layers()).store(_tokens(2 * CHUNK), _table(1))
    with pytest.raises(KeyError), announced(save, []):
        raise KeyError("the engine's own")
    assert pool.saves[0].is_aborted
    assert pool.stored == {}


def test_salt_and_adapter_keep_prefixes_apart(pool: FakePool) -> None:
    tokens = _tokens(2 * CHUNK + 1)
    prefix = _prefix(pool, _layers())
    prefix.store(tokens, _table(1), adapter="lora-1", salt=b"tenant").commit()
    owned: dict[str, Any] = {"adapter": "lora-1", "salt": b"tenant"}
    for arguments, expected in (({}, 0), (owned, 2 * CHUNK)):
        with prefix.restore(tokens, _table(2), **arguments) as restored:
            assert restored.tokens == expected
