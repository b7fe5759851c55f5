"""The torch adapter over a fake pool: what is restored, what is left to compute, and what happens when less comes."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    Prompt,
    announced,
    gated,
    layout_of,
    prefill_batch,
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


def _modules(count: int = LAYERS) -> list[Any]:
    return [torch.nn.Identity() for _ in range(count)]


def _run(modules: list[Any]) -> None:
    """A forward pass."""
    for module in modules:
        module(torch.zeros(1))


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
    modules = _modules()
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
    modules = _modules()
    restored = _prefix(pool, _layers()).restore(tokens, _table(2))
    ended = pytest.raises(PrefixShortened, match="32 tokens, checksum")
    with restored, gated(restored, modules), ended as raised:
        modules[0](torch.zeros(1))
    assert raised.value.restored is restored
    modules[0](torch.zeros(1))


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
    modules = _modules()
    with announced(save, modules, len(tokens)):
        for number, module in enumerate(modules):
            assert pool.saves[0].announced == list(range(number))
            layers[number].fill_(number)
            module(torch.zeros(1))
    modules[0](torch.zeros(1))
    assert save.commit().stored == 2
    assert all((parts[number] == number).all() for parts in pool.stored.values() for number in range(LAYERS))


def test_an_exception_while_announcing_aborts_the_save(pool: FakePool) -> None:
    save = _prefix(pool, _layers()).store(_tokens(2 * CHUNK), _table(1))
    with pytest.raises(KeyError), announced(save, _modules(), 2 * CHUNK):
        raise KeyError("the engine's own")
    assert pool.saves[0].is_aborted
    assert pool.stored == {}


def test_a_prefill_that_did_not_wait_for_a_layer_is_refused(pool: FakePool) -> None:
    tokens, modules = _tokens(2 * CHUNK + 1), _modules()
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        with pytest.raises(kv.InvalidArgument, match="layer 3 of 4 was never waited for"), gated(restored, modules):
            restored.prefill(lambda _: _run(modules[:3]))
        assert restored.settle() == 2 * CHUNK
        assert restored.prefill(lambda start: start) == 2 * CHUNK


@pytest.mark.parametrize("count", [0, LAYERS - 1, LAYERS + 1])
@pytest.mark.parametrize("is_hit", [True, False])
def test_another_number_of_modules_than_layers_is_refused(pool: FakePool, count: int, is_hit: bool) -> None:
    tokens, wrong = _tokens(2 * CHUNK + 1), pytest.raises(kv.InvalidArgument, match=f"modules are {count}, .*4 layers")
    if is_hit:
        _stored(pool, tokens)
    prefix = _prefix(pool, _layers())
    with prefix.restore(tokens, _table(2)) as restored, wrong, gated(restored, _modules(count)):
        pass
    with wrong, announced(prefix.store(tokens, _table(2)), _modules(count), len(tokens)):
        pass
    with wrong:
        prefix.prefill([Prompt(tokens, _table(2))], _modules(count), lambda starts: starts)


def test_one_module_for_two_layers_is_refused(pool: FakePool) -> None:
    prefix, tokens, modules = _prefix(pool, _layers()), _tokens(CHUNK), _modules()
    modules[3] = modules[1]
    with (
        pytest.raises(kv.InvalidArgument, match="one module twice"),
        announced(prefix.store(tokens, _table(1)), modules, CHUNK),
    ):
        pass


def test_modules_that_run_in_another_order_announce_nothing_that_is_not_computed(pool: FakePool) -> None:
    save, modules = _prefix(pool, _layers()).store(_tokens(CHUNK), _table(1)), _modules()
    with pytest.raises(kv.InvalidArgument, match="module 1 ran before module 0"), announced(save, modules, CHUNK):
        _run(modules[1:])
    assert (pool.saves[0].announced, pool.saves[0].is_aborted) == ([], True)


def test_a_save_beyond_what_the_pass_computes_is_refused(pool: FakePool) -> None:
    save = _prefix(pool, _layers()).store(_tokens(4 * CHUNK), _table(1))
    wrong = pytest.raises(
        kv.InvalidArgument, match=r"up to 128, and the pass computes those up to 127: .*store\(tokens"
    )
    with wrong, announced(save, _modules(), 4 * CHUNK - 1):
        pass
    with pytest.raises(kv.InvalidArgument, match="end is '128'"), announced(save, _modules(), cast(Any, "128")):
        pass
    assert pool.stored == {}


@pytest.mark.parametrize("is_one_context", [True, False])
def test_a_save_is_announced_in_one_pass(pool: FakePool, is_one_context: bool) -> None:
    tokens, modules = _tokens(2 * CHUNK), _modules()
    save = _prefix(pool, _layers()).store(tokens, _table(1))
    if is_one_context:
        again = pytest.raises(kv.InvalidArgument, match=r"module 0 ran a second time.*store\(tokens\[:end\]\)")
        with again, announced(save, modules, len(tokens)):
            _run(modules + modules)
        assert pool.saves[0].is_aborted
        return
    with announced(save, modules, len(tokens)):
        _run(modules)
    again = pytest.raises(kv.InvalidArgument, match=r"announced before: .*store\(tokens\[:end\]\)")
    with again, announced(save, modules, len(tokens)):
        pass
    assert save.commit().stored == 2


def test_each_pass_of_several_saves_what_it_has_computed(pool: FakePool) -> None:
    layers, tokens, modules = _layers(), _tokens(3 * CHUNK + 5), _modules()
    prefix, table = _prefix(pool, layers), _table(1)
    stored = []
    for end in (CHUNK + 3, 2 * CHUNK, len(tokens)):
        save = prefix.store(tokens[:end], table)
        with announced(save, modules, end):
            for number, module in enumerate(modules):
                layers[number].fill_(end)
                module(torch.zeros(1))
        stored.append(save.commit().stored)
    assert stored == [1, 1, 1]
    keys = pool.keys(tokens)
    values = [float(pool.stored[keys[chunk]][0].max()) for chunk in range(3)]
    assert values == [CHUNK + 3, 2 * CHUNK, len(tokens)]


class Batch:
    """Four prompts of growing length with one head, their blocks, and a model that fills what it computes with each token's
    id."""

    def __init__(self, pool: FakePool) -> None:
        head = _tokens(2 * CHUNK)
        self.tokens = [head + [100 * number + more for more in range(number * CHUNK + 5)] for number in range(4)]
        self.layers = _layers()
        ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5))
        sizes = [-(-len(tokens) // BLOCK) for tokens in self.tokens]
        self.tables = list(ids[: sum(sizes)].split(sizes))
        self.modules = _modules()
        self.prefix = _prefix(pool, self.layers)
        self.starts: list[list[int]] = []

    def prompts(self) -> list[Prompt]:
        return [Prompt(tokens, table) for tokens, table in zip(self.tokens, self.tables, strict=True)]

    def forward(self, starts: list[int]) -> str:
        """One forward pass over all prompts from these tokens on. Fails where KV before them is not that of their ids."""
        self.starts.append(starts)
        for number, module in enumerate(self.modules):
            for tokens, table, start in zip(self.tokens, self.tables, starts, strict=True):
                for position in range(start, len(tokens)):
                    self.layers[number][:, table[position // BLOCK], position % BLOCK] = tokens[position] + number
            module(torch.zeros(1))
            assert self.wrong(number) == []
        return "logits"

    def wrong(self, layer: int) -> list[int]:
        """Prompts whose KV of this layer is not that of their ids."""
        return [
            number
            for number, (tokens, table) in enumerate(zip(self.tokens, self.tables, strict=True))
            if (self.kv_of(table, len(tokens), layer) != torch.tensor(tokens) + layer).any()
        ]

    def kv_of(self, table: Any, count: int, layer: int) -> Any:
        return self.layers[layer][0, table].flatten(0, 1)[:count, 0, 0]


def test_a_cold_batch_with_a_common_head_stores_everything(pool: FakePool) -> None:
    batch = Batch(pool)
    assert batch.prefix.prefill(batch.prompts(), batch.modules, batch.forward) == "logits"
    assert batch.starts == [[0, 0, 0, 0]]
    assert [pool.lookup(pool.keys(tokens)).tokens for tokens in batch.tokens] == [
        2 * CHUNK,
        3 * CHUNK,
        4 * CHUNK,
        5 * CHUNK,
    ]


def _stored_batch(pool: FakePool, missing: int = 0) -> None:
    """The KV of a batch in the pool, without the last `missing` chunks of each prompt."""
    cold = Batch(pool)
    cold.tokens = [tokens[: len(tokens) - missing * CHUNK] for tokens in cold.tokens]
    cold.prefix.prefill(cold.prompts(), cold.modules, cold.forward)
    pool.saves.clear()


def test_a_batch_is_restored_and_computed_in_one_pass(pool: FakePool) -> None:
    _stored_batch(pool, missing=1)
    batch = Batch(pool)
    batch.prefix.prefill(batch.prompts(), batch.modules, batch.forward)
    assert batch.starts == [[2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]]
    assert pool.lookup(pool.keys(batch.tokens[3])).tokens == 5 * CHUNK


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("prompt", range(4))
def test_a_batch_starts_again_from_what_each_prompt_has(pool: FakePool, layer: int, prompt: int) -> None:
    _stored_batch(pool, missing=1)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (0, layer), prompt
    batch.prefix.prefill(batch.prompts(), batch.modules, batch.forward)
    full = [2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK]
    again = [0 if number == prompt else have for number, have in enumerate(full)]
    assert batch.starts == [full, again]
    assert [save.is_aborted for save in pool.saves] == [True] * 4 + [False] * 4
    assert pool.lookup(pool.keys(batch.tokens[prompt])).tokens == (2 + prompt) * CHUNK


def test_prefills_of_two_prompts_can_be_nested(pool: FakePool) -> None:
    _stored_batch(pool)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (1, 1), 0
    one, other = (batch.prefix.restore(batch.tokens[number], batch.tables[number]) for number in (0, 1))
    starts: list[tuple[int, int]] = []

    def forward(first: int, second: int) -> str:
        starts.append((first, second))
        _run(batch.modules)
        return "logits"

    with one, other, gated([one, other], batch.modules):
        answer = one.prefill(lambda first: other.prefill(lambda second: forward(first, second)))
    assert answer == "logits"
    assert starts == [(2 * CHUNK, 3 * CHUNK), (CHUNK, 3 * CHUNK)]


def test_a_prefix_that_came_shorter_is_answered_by_its_own_prefill_alone(pool: FakePool) -> None:
    _stored_batch(pool)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (1, 1), 0
    one, other = (batch.prefix.restore(batch.tokens[number], batch.tables[number]) for number in (0, 1))
    starts: list[int] = []

    def forward(start: int) -> None:
        starts.append(start)
        _run(batch.modules)

    with one, other, gated([one, other], batch.modules):
        with pytest.raises(PrefixShortened) as raised:
            other.prefill(forward)
        with pytest.raises(PrefixShortened):
            prefill_batch([other], lambda _: _shortened(one))
        other.settle()
    assert raised.value.restored is one
    assert starts == [3 * CHUNK]


def _shortened(restored: Any) -> None:
    raise PrefixShortened(restored)


def test_an_exception_in_a_batch_saves_nothing_and_ends_what_was_begun(pool: FakePool) -> None:
    _stored_batch(pool, missing=1)
    batch, before = Batch(pool), set(pool.stored)

    def forward(_starts: list[int]) -> None:
        _run(batch.modules[:2])
        raise KeyError("the engine's own")

    with pytest.raises(KeyError):
        batch.prefix.prefill(batch.prompts(), batch.modules, forward)
    assert set(pool.stored) == before
    assert all(save.is_aborted for save in pool.saves)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in batch.modules)


def test_a_batch_with_a_module_that_did_not_run_is_refused_and_not_saved(pool: FakePool) -> None:
    _stored_batch(pool, missing=1)
    batch, before = Batch(pool), set(pool.stored)
    with pytest.raises(kv.InvalidArgument, match="module 3 of 4 did not run"):
        batch.prefix.prefill(batch.prompts(), batch.modules, lambda _: _run(batch.modules[:3]))
    assert set(pool.stored) == before


@pytest.mark.parametrize("ran", range(LAYERS))
def test_modules_that_did_not_run_store_nothing_on_a_miss_either(pool: FakePool, ran: int) -> None:
    """As with hooks on another copy of the model, a forward that is a coroutine, or an early exit."""
    batch, did_not_run = Batch(pool), pytest.raises(kv.InvalidArgument, match=f"module {ran} of 4 did not run")
    with did_not_run:
        batch.prefix.prefill(batch.prompts(), batch.modules, lambda _: _run(batch.modules[:ran]))
    save = batch.prefix.store(batch.tokens[0], batch.tables[0])
    with did_not_run, announced(save, batch.modules, len(batch.tokens[0])):
        _run(batch.modules[:ran])
    assert pool.saves[-1].is_aborted
    assert pool.stored == {}


@pytest.mark.parametrize("way", ["goes on", "settles and goes on", "tries again"])
def test_a_pass_that_goes_on_with_less_than_was_promised_is_run_again(pool: FakePool, way: str) -> None:
    _stored_batch(pool, missing=1)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (0, 2), 1
    restores = [batch.prefix.restore(tokens, ids) for tokens, ids in zip(batch.tokens, batch.tables, strict=True)]
    waits: list[list[bool]] = []

    def forward(starts: list[int]) -> list[int]:
        batch.starts.append(starts)
        waits.append([])
        for layer in range(LAYERS):
            if way == "settles and goes on":
                restores[1].settle()
            waits[-1].append(sum(restored.wait_layer(layer) for restored in restores) == 4)
        if way == "tries again":
            with contextlib.suppress(PrefixShortened):
                raise PrefixShortened(restores[1])
        return starts

    with contextlib.ExitStack() as stack:
        for restored in restores:
            stack.enter_context(restored)
        full, again = [2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK], [2 * CHUNK, 0, 3 * CHUNK, 4 * CHUNK]
        assert prefill_batch(restores, forward) == again
    assert batch.starts == [full, again]
    if way != "settles and goes on":
        assert waits == [[True, True, False, False], [True] * LAYERS], "False until a pass begins with what there is"


def test_a_pass_that_swallows_what_came_short_saves_nothing_of_it(pool: FakePool) -> None:
    _stored_batch(pool, missing=1)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (0, 2), 1

    def forward(starts: list[int]) -> list[int]:
        batch.starts.append(starts)
        for module in batch.modules:
            with contextlib.suppress(PrefixShortened):
                module(torch.zeros(1))
        return starts

    again = [2 * CHUNK, 0, 3 * CHUNK, 4 * CHUNK]
    assert batch.prefix.prefill(batch.prompts(), batch.modules, forward) == again
    assert batch.starts == [[2 * CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK], again]
    assert [save.is_aborted for save in pool.saves] == [True] * 4 + [False] * 4


def test_hooks_are_of_the_thread_that_enters_them(pool: FakePool) -> None:
    _stored_batch(pool)
    batch = Batch(pool)
    pool.fail_at, pool.fail_load = (1, 1), 0
    others: list[str] = []

    def other() -> None:
        _run(batch.modules)
        others.append("computed")

    def forward(starts: list[int]) -> list[int]:
        for run in (other, other):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        _run(batch.modules)
        return starts

    prompts = batch.prompts()[:2]
    assert batch.prefix.prefill(prompts, batch.modules, forward) == [CHUNK, 3 * CHUNK]
    assert others == ["computed"] * 4


def test_two_threads_prefill_with_one_model(pool: FakePool) -> None:
    batch, both = Batch(pool), threading.Barrier(2, timeout=60)

    def prefill(number: int) -> list[int]:
        def forward(starts: list[int]) -> list[int]:
            for module in batch.modules:
                both.wait()
                module(torch.zeros(1))
            return starts

        return batch.prefix.prefill([batch.prompts()[number]], batch.modules, forward)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(prefill, (0, 1))) == [[0], [0]]
    assert [pool.lookup(pool.keys(tokens)).chunks for tokens in batch.tokens[:2]] == [2, 3]


@pytest.mark.parametrize("is_warm", [False, True])
def test_one_block_at_two_prompts_is_one_of_a_head_that_they_share(pool: FakePool, is_warm: bool) -> None:
    if is_warm:
        _stored_batch(pool, missing=1)
    batch, before = Batch(pool), set(pool.stored)
    head = 2 * CHUNK // BLOCK
    batch.tables[2] = torch.cat([batch.tables[1][:head], batch.tables[2][head:]])
    wrong = [
        *batch.tables[:3],
        torch.cat([batch.tables[3][:head], batch.tables[2][head : head + 1], batch.tables[3][head:-1]]),
    ]
    prompts = [Prompt(tokens, table) for tokens, table in zip(batch.tokens, wrong, strict=True)]
    with pytest.raises(
        kv.InvalidArgument, match=r"prompts 2 and 3 have block \d+ at places 8 and 8 .* first 72 tokens"
    ):
        batch.prefix.prefill(prompts, batch.modules, batch.forward)
    salted = [Prompt(batch.tokens[1], batch.tables[1]), Prompt(batch.tokens[2], batch.tables[2], salt=b"tenant")]
    with pytest.raises(kv.InvalidArgument, match=r"prompts 0 and 1 have block \d+ at places 0 and 0"):
        batch.prefix.prefill(salted, batch.modules, batch.forward)
    assert set(pool.stored) == before
    assert batch.prefix.prefill(batch.prompts(), batch.modules, batch.forward) == "logits"


def test_equal_prompts_may_have_all_blocks_in_common(pool: FakePool) -> None:
    batch = Batch(pool)
    batch.tokens[0], batch.tables[0] = batch.tokens[1], batch.tables[1]
    assert batch.prefix.prefill(batch.prompts(), batch.modules, batch.forward) == "logits"


def test_a_head_is_in_common_up_to_content_that_one_prompt_has(pool: FakePool) -> None:
    batch = Batch(pool)
    head = 2 * CHUNK // BLOCK
    batch.tables[2] = torch.cat([batch.tables[1][:head], batch.tables[2][head:]])
    both = [(batch.tokens[1], batch.tables[1]), (batch.tokens[2], batch.tables[2])]
    for first, is_apart in ((2 * CHUNK, True), (2 * CHUNK - 1, False)):
        prompts = [Prompt(*both[0]), Prompt(*both[1], extra=[(first, 2 * CHUNK + 1, b"image")])]
        expected = (
            contextlib.nullcontext() if is_apart else pytest.raises(kv.InvalidArgument, match="at places 7 and 7")
        )
        with expected:
            batch.prefix._check_apart(prompts)


def test_blocks_of_two_prompts_are_refused_before_anything_is_loaded(pool: FakePool) -> None:
    _stored_batch(pool, missing=1)
    batch = Batch(pool)
    prompts = [Prompt(batch.tokens[1], batch.tables[1]), Prompt(batch.tokens[2], batch.tables[1])]
    with pytest.raises(kv.InvalidArgument, match="prompts 0 and 1 have block"):
        batch.prefix.prefill(prompts, batch.modules, batch.forward)
    assert pool.loads == []


def test_a_batch_of_no_prompts_is_computed_as_it_is(pool: FakePool) -> None:
    assert _prefix(pool, _layers()).prefill([], _modules(), lambda starts: starts) == []


def test_a_gate_that_no_module_passed_is_an_error(pool: FakePool) -> None:
    """As where the model runs on another thread, or was compiled before."""
    tokens, modules = _tokens(2 * CHUNK + 1), _modules()
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        with pytest.raises(kv.InvalidArgument, match="layer 0 of 4 was never waited for"), gated(restored, modules):
            pass
        with pytest.raises(KeyError), gated(restored, modules):
            raise KeyError("the engine's own")
        with gated(restored, modules):
            _run(modules)


def test_only_who_computes_acknowledges_what_came_shorter(pool: FakePool) -> None:
    tokens = _tokens(3 * CHUNK + 1)
    _stored(pool, tokens)
    pool.fail_at = (1, 0)
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        assert restored.tokens == 3 * CHUNK
        assert restored.finish_load() == CHUNK
        assert not any(restored.wait_layer(layer) for layer in range(LAYERS))
        assert restored.settle() == CHUNK
        assert all(restored.wait_layer(layer) for layer in range(LAYERS))
        restored.drop_tokens(BLOCK)
        assert (restored.tokens, restored.wait_layer(0)) == (BLOCK, True)


def test_what_was_left_is_not_prefilled_again(pool: FakePool) -> None:
    tokens, modules = _tokens(2 * CHUNK + 1), _modules()
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2)) as restored:
        pass
    left = pytest.raises(kv.InvalidArgument, match="64 tokens, complete> has ended: its context was left")
    with left:
        restored.prefill(lambda start: start)
    with left, gated(restored, modules):
        pass


@pytest.mark.parametrize("wrong", [None, "name", dict])
def test_what_is_no_module_leaves_no_hook_behind(pool: FakePool, wrong: object) -> None:
    modules: list[Any] = [*_modules(2), wrong, *_modules(1)]
    prefix = _prefix(pool, _layers())
    refused = pytest.raises(kv.InvalidArgument, match=r"module 2 is \w+, expected a torch.nn.Module")
    with refused, announced(prefix.store(_tokens(CHUNK), _table(1)), modules, CHUNK):
        pass
    with prefix.restore(_tokens(CHUNK), _table(1)) as restored, refused, gated(restored, modules):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules[:2])


def test_arguments_of_another_kind_are_refused_by_name(pool: FakePool) -> None:
    prefix, tokens, table, modules = _prefix(pool, _layers()), _tokens(CHUNK), _table(1), _modules()
    wrong: Any
    for wrong, found in ((Prompt(tokens, table), "prompts is Prompt"), ([(tokens, table)], "prompt 0 is tuple")):
        with pytest.raises(kv.InvalidArgument, match=f"{found}, expected a list of Prompt"):
            prefix.prefill(wrong, modules, lambda starts: starts)
    for wrong in (None, [None], prefix):
        refused = pytest.raises(
            kv.InvalidArgument, match=r"restored is .*, expected what PagedPrefixCache.restore answered"
        )
        with refused, gated(wrong, modules):
            pass
        refused = pytest.raises(kv.InvalidArgument, match=r"save is .*, expected what PagedPrefixCache.store answered")
        with refused, announced(wrong, modules, [1] if isinstance(wrong, list) else 1):
            pass


def test_held_tokens_may_be_numpys(pool: FakePool) -> None:
    tokens = _tokens(2 * CHUNK + 1)
    _stored(pool, tokens)
    with _prefix(pool, _layers()).restore(tokens, _table(2), cast(Any, np.int64(CHUNK))) as restored:
        assert restored.tokens == 2 * CHUNK


@pytest.mark.parametrize("kind", ["freed", "sparse"])
def test_tensors_whose_memory_is_not_there_are_refused(kind: str) -> None:
    layers = _layers()[:1]
    with kv.connect(AWAY, model="none", revision="1", layout=layout_of(layers, CHUNK)) as pool:
        if kind == "freed":
            layers[0].untyped_storage().resize_(0)
        else:
            layers[0] = layers[0].to_sparse()
        with pytest.raises(kv.InvalidArgument, match=r"layer 0 has .*memory.*, expected a"):
            PagedPrefixCache(pool, layers, BLOCK)


@pytest.mark.parametrize("way", ["resize_", "set_", "data"])
def test_tensors_with_other_memory_than_was_registered_are_refused(way: str) -> None:
    layers = _layers()
    with kv.connect("/nonexistent/kvpool.sock", model="moved", revision="1", layout=layout_of(layers, CHUNK)) as pool:
        prefix = PagedPrefixCache(pool, layers, BLOCK)
        prefix.store(_tokens(CHUNK), _table(1)).abort()
        if way == "resize_":
            layers[2].resize_(2, 4 * BLOCKS, BLOCK, 2, 16)
        elif way == "set_":
            layers[2].set_(torch.zeros_like(layers[2]))
        else:
            layers[2].data = torch.zeros_like(layers[2])
        with pytest.raises(kv.InvalidArgument, match=r"layer 2 was registered at .* register the tensors again"):
            prefix.store(_tokens(CHUNK), _table(1))


def test_salt_and_adapter_keep_prefixes_apart(pool: FakePool) -> None:
    tokens = _tokens(2 * CHUNK + 1)
    prefix = _prefix(pool, _layers())
    prefix.store(tokens, _table(1), adapter="lora-1", salt=b"tenant").commit()
    owned: dict[str, Any] = {"adapter": "lora-1", "salt": b"tenant"}
    for arguments, expected in (({}, 0), (owned, 2 * CHUNK)):
        with prefix.restore(tokens, _table(2), **arguments) as restored:
            assert restored.tokens == expected
