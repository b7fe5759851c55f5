"""Identity of rows: the name of the model and its weights, and what gives a row's bytes their meaning.

vLLM's keys identify tokens, and nothing else. A tier is handed a few facts of the engine; the rest, weights' formats and
overrides among them, is in vLLM's configuration, which stands in the frames of those who make the tier. Where it does not (a
tier made by something else than vLLM's connector) the weights are identified by the model's path or commit alone, and formats
by what a tier is handed.

One row has the blocks of all ranks: so the sizes of all parallelism are in the Layout's format, but where vLLM certifies that
the bytes do not depend on them. Where an engine is made for weights that change in place its chunks are this start's alone.
Reads configuration and files of the model; the thread that makes the tier.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from types import FrameType
from typing import Any

import kvpool_native
from kvpool.errors import LayoutMismatch
from kvpool.layout import CHUNK_BYTES_MAX, Layout
from kvpool_client.engines.weights import Revision, weights_of
from kvpool_client.vllm.identity.cache_facts import cache_words, spec_words, specs_of
from kvpool_client.vllm.identity.engine_form import engine_form
from kvpool_client.vllm.identity.identity import LIFE, NAME_CHARACTERS_MAX, UNKNOWN, model_name
from kvpool_client.vllm.ranks.placement import SEVERAL_NODES, check_nodes
from kvpool_client.vllm.support import Unserved
from kvpool_client.vllm.tier.settings import Settings

FORMAT = "vllm-tier-1"
_AXIS_MAX = 1 << 16
# Executors under which a region has not the blocks of all ranks.
_SPREAD = {
    "ray": "Ray may place the {} ranks on other hosts, whose rows are not in this host's region",
    "external_launcher": "each of the {} ranks that a launcher has started has a region of its own, without the others' blocks",
}
# What is looked for in the frames of those who make a tier: a variable's name, and what its value has.
_PARTS = {"vllm_config": "model_config", "kv_cache_config": "kv_cache_groups", "self": "collective_rpc"}
_SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM's own configuration, of the engine and of its caches, and its core; None where they are out of reach."""

    config: Any = None
    caches: Any = None
    core: Any = None

    @classmethod
    def of_caller(cls) -> "Engine":
        """That of whoever is making the tier."""
        found: dict[str, Any] = {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(found) < len(_PARTS):
            for name, part in _PARTS.items():
                value = frame.f_locals.get(name)
                if name not in found and hasattr(value, part):
                    found[name] = value
            frame = frame.f_back
        return cls(*map(found.get, _PARTS))


@dataclass(frozen=True, slots=True)
class Identity:
    """`name` and `revision`: of the model in the pool; `layout`: of a row."""

    name: str
    revision: Revision
    layout: Layout


def identify(
    spec: Any, row_bytes: int, engine: Engine, *, settings: Settings, environment: Mapping[str, str]
) -> Identity:
    """The identity of an engine's rows, whose weights are to be read. Raises LayoutMismatch where they are not served."""
    facts = spec.config
    _check_hosts(engine)
    name, revision = _model_of(facts, engine, settings, environment)
    return Identity(name, revision, _layout_of(facts, row_bytes, engine))


def _check_hosts(engine: Engine) -> None:
    """Raises Unserved where other hosts have ranks: the region here has nothing of theirs."""
    parallel = getattr(engine.config, "parallel_config", None)
    check_nodes(parallel)
    executor, ranks = (
        str(getattr(parallel, "distributed_executor_backend", None)),
        int(getattr(parallel, "world_size", 1)),
    )
    if executor in _SPREAD and ranks > 1:
        raise Unserved(
            SEVERAL_NODES, _SPREAD[executor].format(ranks), "start vLLM with --distributed-executor-backend mp"
        )


def _model_of(facts: Any, engine: Engine, settings: Settings, environment: Mapping[str, str]) -> tuple[str, Revision]:
    place = str(facts.model.name)
    short = settings.model or "/".join(place.rstrip("/").rsplit("/", 2)[-2:])[-NAME_CHARACTERS_MAX:]
    given = {"operator": settings.revision, "dtype": str(facts.model.dtype)}
    if engine.config is not None:
        # vLLM's keys name adapters, and not their weights.
        has_adapters = getattr(engine.config, "lora_config", None) is not None
        if has_adapters and not settings.revision:
            raise Unserved(
                UNKNOWN,
                "an adapter that is loaded again in place (load_inplace) keeps its name and its path, and vLLM its KV",
                "set the tier's revision, to any word, and call reset_prefix_cache(reset_connector=True) after each such load",
            )
        is_trained = getattr(engine.config, "weight_transfer_config", None) is not None
        given["life"] = LIFE if has_adapters or is_trained else ""
        named = model_name(engine.config, settings.model or (short if settings.revision else ""))
        return short, Revision(given, engine=named.revision)
    weights = settings.revision or ""
    if not weights:
        try:
            return short, Revision(given, weights=weights_of(place, "", environment))
        except LayoutMismatch as error:
            if not settings.model or Path(place).exists():
                raise Unserved(
                    UNKNOWN, str(error), "set the tier's revision to a name that changes whenever the weights do"
                ) from error
    return short, Revision(given, weights=weights)


def _layout_of(facts: Any, row_bytes: int, engine: Engine) -> Layout:
    """One packed layer of a row's bytes, for the tokens of a chunk of the first group."""
    blocks = int(facts.cache.blocks_per_chunk)
    if not 0 < row_bytes <= CHUNK_BYTES_MAX:
        raise LayoutMismatch(
            f"a row of {blocks} blocks has {row_bytes} bytes, expected at most {CHUNK_BYTES_MAX}: set fewer blocks_per_chunk"
        )
    tokens = int(facts.groups[0].tokens_per_block) * blocks
    if row_bytes % tokens:
        tokens = 1
    token_bytes = row_bytes // tokens
    head_dim = gcd(token_bytes, _AXIS_MAX)
    if (
        token_bytes // head_dim > _AXIS_MAX
    ):  # rows are whole pages, so a row has fewer pages than a chunk may have tokens
        token_bytes = head_dim = gcd(row_bytes, _AXIS_MAX)
        tokens = row_bytes // token_bytes
    return Layout(
        layers=1,
        kv_heads=token_bytes // head_dim,
        head_dim=head_dim,
        dtype="uint8",
        chunk_tokens=tokens,
        planes=1,
        format=_format_of(facts, engine),
        block_tokens=tokens,
    )


def _format_of(facts: Any, engine: Engine) -> str:
    """What gives a row's bytes their meaning, shortened to a digest."""
    parallel, layout = facts.parallel, str(getattr(facts, "kv_cache_layout", None))
    is_canonical, is_one_copy = (
        bool(getattr(facts, "canonical_layout", False)),
        bool(getattr(facts, "replicated_layout", False)),
    )
    is_alike = is_one_copy or (is_canonical and bool(parallel.is_parallelism_agnostic))
    words = {
        "dtype": str(facts.model.dtype),
        "layout": layout,
        "canonical": is_canonical,
        "sizes": "any" if is_alike else [int(getattr(parallel, size, 1)) for size in _SIZES],
        "hash tokens": int(facts.cache.tokens_per_hash),
        "blocks": int(facts.cache.blocks_per_chunk),
        "block bytes": 0 if is_alike else int(facts.worker_kv_bytes_per_block),  # a rank's
        "groups": [
            [int(group.group_id), int(group.tokens_per_block), list(group.layer_names)] for group in facts.groups
        ],
        "forms": _forms_of(engine, 1 if is_alike else None),
        "caches": cache_words(getattr(engine.config, "cache_config", None)),
        "specs": [spec_words(group, is_of_model=is_alike) for group in _groups_of(engine)],
    }
    digest = kvpool_native.blake3(json.dumps(words, sort_keys=True).encode()).hex()
    return f"{FORMAT} {facts.model.dtype} {layout} {digest}"


def _forms_of(engine: Engine, heads: int | None) -> list[str]:
    """The order of bytes inside the blocks of each kind, which are a rank's or of so many heads: CPUs pack K for their
    instruction set, backends choose their own."""
    if engine.config is None:
        return []
    specs: list[Any] = [spec for group in _groups_of(engine) for spec in specs_of(group).values()]
    forms = {engine_form(engine.config, spec, heads) for spec in specs or [None]}
    return sorted(forms)


def _groups_of(engine: Engine) -> Sequence[Any]:
    """vLLM's groups of layers, with their specs."""
    return getattr(engine.caches, "kv_cache_groups", ())
