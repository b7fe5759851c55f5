"""Device pages: the KV pools of SGLang's forward pass described as pages of opaque bytes, part by part and layer by layer.

A linker moves pages straight between these pools and kvpool's arena. A page has a part for each layer and plane: K and V,
the compressed KV of MLA, a state and its convolutions. Parts of one size become the layers of a packed Layout, in the order in
which the forward reads them: a page is one chunk of each Layout, and a load completes layer by layer. What the parts hold is in
the Layout's format, and engines share pages only where the formats are equal. Not described are scaled and quantised KV,
indexers, compressed KV of DeepSeek V4, draft models and unified memory: models with those share nothing.

Pure but for reading the pools' attributes; the views keep the pools' memory. Any thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpool.errors import LayoutMismatch
from kvpool_client.sglang.host_pages import KV, PoolPages, Shard, format_of_words, packed_layout

SWA, MAMBA = "swa", "mamba"
# Classes of SGLang's whose buffers are all that a page has.
_HEADS, _LATENT = ("MHATokenToKVPool", "PageMajorMHATokenToKVPool"), ("MLATokenToKVPool",)
_FIELDS = (
    "dtype",
    "store_dtype",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "kv_cache_layout",
)
_SCALES = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer", "kv_scale_buffer")

# A part of every page: after which of the engine's layers it is read, and the array [rows, …] that has it.
_Part = tuple[int, Any]


def describe_device_pools(params: Any, shard: Shard) -> dict[str, tuple[PoolPages, ...]]:
    """The pages of each pool of a model, by SGLang's names of the pools; parts of other sizes have a Layout of their own.

    `params`: SGLang's CacheInitParams. Raises LayoutMismatch for a model of which a page has more than is described here.
    """
    cache, page_tokens = params.token_to_kv_pool_allocator.get_kvcache(), int(params.page_size)
    if getattr(params, "mtp_draft_device_pools", ()) or getattr(params, "sidecar_draft_device_pools", ()):
        raise LayoutMismatch("pages of a draft model's KV are not stored: run without the draft model")
    is_bigram = bool(getattr(params, "is_eagle", False))
    pools = dict(_kv_pools(cache))
    described = {
        name: _pages_of(name, pool, layers, shard, page_tokens=page_tokens, is_bigram=is_bigram)
        for name, (pool, layers) in pools.items()
    }
    if hasattr(cache, "mamba_pool"):
        described[MAMBA] = _states_of(params.req_to_token_pool, int(getattr(cache, "start_layer", 0) or 0), shard)
    return described


def _kv_pools(cache: Any) -> Iterator[tuple[str, tuple[Any, Mapping[int, int]]]]:
    """Each pool of KV by its name, and of the engine's layers, as its forward waits for them, those in it and their places."""
    if hasattr(cache, "swa_kv_pool"):
        mapping = cache.layers_mapping
        for name, pool, is_windowed in ((KV, cache.full_kv_pool, False), (SWA, cache.swa_kv_pool, True)):
            yield (
                name,
                (pool, {layer: place for layer, (place, is_swa) in mapping.items() if bool(is_swa) == is_windowed}),
            )
    elif hasattr(cache, "full_kv_pool"):
        first = int(cache.start_layer or 0)
        yield (
            KV,
            (cache.full_kv_pool, {layer - first: at for layer, at in cache.full_attention_layer_id_mapping.items()}),
        )
    else:
        yield KV, (cache, {layer: layer for layer in range(int(cache.layer_num))})


def _pages_of(
    name: str, pool: Any, layers: Mapping[int, int], shard: Shard, *, page_tokens: int, is_bigram: bool
) -> tuple[PoolPages, ...]:
    kind = type(pool).__name__
    if kind in _HEADS:
        planes = [pool.k_buffer, pool.v_buffer]
    elif kind in _LATENT:
        planes = [pool.kv_buffer]
    else:
        raise LayoutMismatch(
            f"pages of SGLang's {kind} are not described, expected {', '.join(_HEADS + _LATENT)}: run with HiCache's backend"
        )
    scales = [field for field in _SCALES if getattr(pool, field, None) is not None]
    if scales:
        raise LayoutMismatch(
            f"pages of scaled KV are not stored, and the pool has {scales[0]}: set another --kv-cache-dtype"
        )
    if int(pool.page_size) != page_tokens:
        raise LayoutMismatch(f"pages of pool {name} have {pool.page_size} tokens, expected the tree's {page_tokens}")
    # A row is a token's, or in layouts for some attention kernels a page's.
    is_paged = getattr(pool, "kv_cache_layout", "nhd") != "nhd"
    parts = [(layer, plane[at]) for layer, at in sorted(layers.items()) for plane in planes]
    facts = " ".join(f"{field}={getattr(pool, field)}" for field in _FIELDS if hasattr(pool, field))
    words = f"{kind} {facts} layers={sorted(layers)}{' bigram' * is_bigram}"
    own = shard if kind in _HEADS else replace(shard, is_replicated=True)
    return _described(name, parts, own, words, page_tokens=page_tokens, rows_a_page=1 if is_paged else page_tokens)


def _states_of(req_pool: Any, first_layer: int, shard: Shard) -> tuple[PoolPages, ...]:
    """The states of Mamba: a slot is a page of one token."""
    pool = req_pool.mamba_pool
    for field in ("short_conv_pool", "ngram_pool"):
        if getattr(getattr(req_pool, field, None), "enabled", False):
            raise LayoutMismatch(f"states of {field} are not stored: run with HiCache's backend")
    if getattr(req_pool, "mamba_ckpt_pool", None) is not None or getattr(pool, "_slot_siblings", None):
        raise LayoutMismatch("states beside those of Mamba are not stored: run with HiCache's backend")
    states = [state for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv) if state.numel()]
    layers = {layer - first_layer: at for layer, at in req_pool.mamba_map.items()}
    parts = [(layer, state[at]) for layer, at in sorted(layers.items()) for state in states]
    shapes = " ".join(f"{state.dtype}{list(state.shape[2:])}" for state in states)
    own = replace(shard, is_replicated=False)
    words = f"{type(pool).__name__} {shapes} layers={sorted(layers)}"
    return _described(MAMBA, parts, own, words, page_tokens=1, rows_a_page=1)


def _described(
    name: str, parts: Sequence[_Part], shard: Shard, words: str, *, page_tokens: int, rows_a_page: int
) -> tuple[PoolPages, ...]:
    """Parts of one size and stride together, and the Layout of each kind."""
    kinds: dict[tuple[int, int], list[_Part]] = {}
    for layer, array in parts:
        pages = _as_pages(name, array, rows_a_page)
        kinds.setdefault((int(pages.shape[1]), int(pages.stride(0))), []).append((layer, pages))
    if not kinds:
        raise LayoutMismatch(f"pool {name} has no layers")
    found = []
    for number, ((size, _), own) in enumerate(kinds.items()):
        if size % page_tokens:
            raise LayoutMismatch(
                f"pages of pool {name} have parts of {size} bytes, expected a multiple of {page_tokens} tokens"
            )
        head = f"sglang-linker-1 {name} {number}/{len(kinds)}"
        text = format_of_words(f"{head} {words} {shard.words()}", head)
        layout = packed_layout(shard, len(own), part_bytes=size, page_tokens=page_tokens, words=text)
        found.append(PoolPages(layout, tuple(pages for _, pages in own), page_tokens, tuple(layer for layer, _ in own)))
    return tuple(found)


def _as_pages(name: str, array: Any, rows_a_page: int) -> Any:
    """The bytes of an array of rows, uint8 [pages, bytes]: a view of the same memory."""
    import torch  # optional heavy dependency: SGLang brings it

    pages = int(array.shape[0]) // rows_a_page
    try:
        return array[: pages * rows_a_page].view(torch.uint8).view(pages, -1)
    except RuntimeError as error:
        raise LayoutMismatch(
            f"pool {name} has rows of shape {tuple(array.shape)} and strides {array.stride()}, expected pages whose bytes lie "
            "one behind the other"
        ) from error
