"""Identity of SGLang's model: the revision under which pages are stored, made of its weights and arguments.

SGLang passes a backend the served model name, which does not identify the weights. So weights in a directory are read, a model
of the Hub is named by its commit, and everything else that changes KV is included: overrides of the model's
configuration, quantization, data types. What shapes pages (layout, KV type, ranks) is in the layout's format, see `host_pages`.
The length of a context is not here: it changes no KV.

Files are read in the background, once (`engines/weights`). Any thread.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.weights import Revision, Weights, weights_of
from kvpool_client.sglang.settings import HICACHE, Settings

# SGLang's arguments that change KV without changing the weights' files or the pages' shapes.
MODEL_FIELDS = (
    "json_model_override_args",
    "quantization",
    "quantization_param_path",
    "torchao_config",
    "quantize_and_serve",
    "modelopt_quant",
    "rl_quant_profile",
    "dtype",
    "kv_cache_dtype",
)
# Those of a draft model, beside its weights.
DRAFT_FIELDS = (
    "speculative_algorithm",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
)
# SGLang's functions that put other weights in the place of the engine's, and then reset its cache.
_UPDATES = {
    "flush_cache_after_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
}
_NO_SERVER = "SGLang's arguments are out of reach"


def named(
    settings: Settings, model_name: str | None, server_args: object, environment: Mapping[str, str]
) -> tuple[Revision | None, str]:
    """The revision that names the weights, and why nothing may be shared where the weights cannot be identified.

    A `revision` set by the operator stands for the weights; everything else that changes KV is included as well.
    """
    facts = {field: str(getattr(server_args, field, None)) for field in MODEL_FIELDS}
    place = str(getattr(server_args, "model_path", None) or model_name or settings.model)
    try:
        weights = settings.revision or _weights(place, "", server_args, environment)
    except (LayoutMismatch, OSError) as error:
        return None, _unidentified(error, server_args, settings.source)
    return Revision(facts, weights=weights), ""


def with_draft(
    target: Revision, revision: str, server_args: object, environment: Mapping[str, str]
) -> tuple[Revision | None, str]:
    """The revision of pools that have KV of a draft model: made of their target's, and of what names the draft.

    `revision`: the operator's, which stands for the draft's weights as well; empty where there is none.
    """
    facts = {field: str(getattr(server_args, field, None)) for field in DRAFT_FIELDS}
    place = getattr(server_args, "speculative_draft_model_path", None)
    try:
        if not revision and not place:
            raise LayoutMismatch("SGLang names no draft model")
        weights = (
            f"{revision} {place}" if revision else _weights(str(place), "speculative_draft_", server_args, environment)
        )
    except (LayoutMismatch, OSError) as error:
        return None, _unidentified(error, server_args, HICACHE)
    return Revision(facts, target=target, weights=weights), ""


def server_args_of_process() -> Any:
    """SGLang's arguments in a scheduler's process, where this version keeps them; None elsewhere. Imports nothing."""
    for module, getter in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        get = getattr(sys.modules.get(module), getter, None)
        try:
            args = get() if callable(get) else None
        except (ValueError, RuntimeError, LookupError, AttributeError):  # it is not set in this process
            args = None
        if args is not None:
            return args
    return None


def weights_update() -> tuple[str, bool]:
    """SGLang's version of its weights, as far as updates name one, and whether the calling thread is within an update that may
    not have: then only the functions that it runs in show it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name not in _UPDATES:
        frame = frame.f_back
    return weights_version(), frame is not None


def weights_version() -> str:
    """SGLang's version of its weights, as far as updates name one."""
    serving = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_serving", None)
    try:
        return str(getattr(serving(), "weight_version", "")) if callable(serving) else ""
    except (ValueError, RuntimeError, LookupError, AttributeError):  # it is not set in this process
        return ""


def unidentified(error: object, source: str) -> str:
    """The refusal of an engine whose weights have no name because of `error`. `source`: where its settings stand."""
    remedy = f"set revision in --{source} to a name that changes whenever the weights do"
    return f"weights: {error}: {remedy}"


def _unidentified(error: Exception, server_args: object, source: str) -> str:
    return unidentified(error if server_args is not None else f"{error} ({_NO_SERVER})", source)


def _weights(place: str, prefix: str, server_args: object, environment: Mapping[str, str]) -> Weights:
    """What identifies the weights at a place. `prefix`: of the arguments that are about them; the target's have none."""
    load_format = getattr(server_args, f"{prefix}load_format", None) or getattr(server_args, "load_format", "")
    if "dummy" in str(load_format):
        return f"dummy {getattr(server_args, 'random_seed', None)}"
    revision = getattr(server_args, f"{prefix}model_revision" if prefix else "revision", None)
    return weights_of(place, str(revision or ""), environment)
