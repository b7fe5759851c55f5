"""Engine form: the order of the bytes inside a block, beyond the configuration, found by a test and not by a version.

On a CPU vLLM's own operation fills one block with known numbers, and a digest of its bytes is the form: K is packed for the
processor's instruction set, and engines with equal forms may share. Elsewhere the operation cannot run, because the scheduler
has no device: there the form is the device's name and a digest of vLLM's own code that shapes, orders and writes its caches.
Releases that agree in that share chunks; releases whose blocks differ never do. Where neither is available, the form is the
release's number.

Uses vLLM and torch where they are loaded, as in an engine. Any thread.
"""

import ast
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import kvpool_native
from kvpool_client.vllm.identity.parts import STATES
from kvpool_client.vllm.surface import CacheSpec, EngineConfig

DIGEST_HEX = 16
CPU_FEATURES = ("_is_amx_tile_supported", "_is_avx512_supported", "_is_avx2_supported")
# Kinds of layers whose blocks that operation fills.
FILLED = ("FullAttentionSpec", "SlidingWindowSpec")
LAYOUTS = "v1/kv_cache_layout.py"
BACKENDS = "v1/attention/backends"
# Functions whose names contain one of these shape or write a cache.
CACHE_WORDS = ("kv_cache", "reshape_and_cache")


def engine_form(config: EngineConfig, spec: CacheSpec | None, heads: int | None = None) -> str:
    """A name for the order of bytes inside this engine's blocks, which are of `spec`, or of so many heads of it."""
    device = str(getattr(getattr(config, "device_config", None), "device_type", "cpu"))
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    parts = [device, str(getattr(backend, "name", backend))]
    filled = (
        _found(lambda: _filled_block(config, spec, heads)) if device == "cpu" and type(spec).__name__ in FILLED else ""
    )
    if filled:
        return "/".join([*parts, platform.machine(), f"bytes-{filled}"])
    parts.append(_cpu_features() if device == "cpu" else _device_name())
    if type(spec).__name__ in STATES:  # ordered by each model's own code, which the release names
        return "/".join([*parts, _version()])
    code = _found(lambda: cache_code(Path(str(find_spec("vllm").origin)).parent))  # type: ignore[union-attr]  # a miss is caught
    return "/".join([*parts, f"code-{code}" if code else _version()])


def cache_code(package: Path) -> str:
    """A digest of the code about caches in vLLM's source directory. Comments and all other code change nothing."""
    text = [ast.dump(ast.parse((package / LAYOUTS).read_bytes()))]
    for path in sorted((package / BACKENDS).rglob("*.py")):
        source = path.read_bytes()
        if any(word.encode() in source for word in CACHE_WORDS):
            text += [f"{path.name} {entry}" for entry in _functions_of_caches(ast.parse(source))]
    return _digest("\n".join(text).encode())


def _functions_of_caches(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(word in node.name for word in CACHE_WORDS):
            node.body = [entry for entry in node.body if not _is_docstring(entry)]
            yield ast.dump(node)


def _is_docstring(entry: ast.stmt) -> bool:
    return isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant)


def _filled_block(config: EngineConfig, spec: CacheSpec | None, of_heads: int | None) -> str:
    """A digest of a block that vLLM's CPU operation has filled. Raises where this vLLM has no such operation."""
    import torch  # the engine's, and only where it runs
    from vllm import _custom_ops as operations
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, width = (getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size"))
    heads = of_heads or heads
    dtype, item = getattr(config.model_config, "dtype", None), getattr(spec, "dtype", None)
    kind = str(getattr(config.cache_config, "cache_dtype", "auto"))
    numbers = torch.arange(2 * tokens * heads * width).remainder(251).div(16).to(dtype).view(2, tokens, heads, width)
    block = torch.zeros((1, heads, 2 * tokens, width), dtype=item)
    operations.cpu_attn_reshape_and_cache(
        numbers[0].contiguous(),
        numbers[1].contiguous(),
        *block.chunk(2, dim=2),
        torch.arange(tokens),
        _get_attn_isa(dtype, tokens, width, kind),
        kv_cache_dtype=kind,
    )
    return _digest(block.view(torch.uint8).numpy().tobytes())


def _found(find: Callable[[], str]) -> str:
    """The digest that was found; empty where this release has no such code."""
    try:
        return find()
    except (
        ImportError,
        OSError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        SyntaxError,
        NotImplementedError,
    ):
        return ""


def _version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def _cpu_features() -> str:
    probes: object = getattr(sys.modules.get("torch"), "cpu", None)
    found = [name for name in CPU_FEATURES if _says_yes(getattr(probes, name, None))]
    return "+".join([platform.machine(), *(name.removeprefix("_is_").removesuffix("_supported") for name in found)])


def _device_name() -> str:
    """The accelerator's name, by which vLLM chooses its attention backend."""
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    ask = getattr(current, "get_device_name", None)
    return str(ask()) if callable(ask) else ""


def _says_yes(probe: Callable[[], object] | None) -> bool:
    return probe is not None and bool(probe())


def _digest(data: bytes) -> str:
    return kvpool_native.blake3(data).hex()[:DIGEST_HEX]
