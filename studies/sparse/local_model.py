"""Samples of a model on this machine: a directory in the format of Hugging Face, named by KVPOOL_SPARSE_MODEL.

The model reads a text; its own attention hands over queries, keys and values after rotary positions, so that every architecture
works that takes its attention from the registry of transformers. Nothing is fetched. Needs torch and transformers; main thread.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.errors import InvalidArgument
from studies.sparse.exact import BLOCK_TOKENS, Samples

MODEL_VARIABLE = "KVPOOL_SPARSE_MODEL"
TEXT_VARIABLE = "KVPOOL_SPARSE_TEXT"
# The name that the capturing attention has in the registry.
_ATTENTION = "kvpool_capture"
QUERIES = 32
TOKENS_MIN = 16 * BLOCK_TOKENS


def local_model() -> Path | None:
    """The directory named by the variable; None if there is none. Raises InvalidArgument for what is no model."""
    named = os.environ.get(MODEL_VARIABLE)
    if not named:
        return None
    path = Path(named)
    for needed in ("config.json", "tokenizer_config.json"):
        if not (path / needed).is_file():
            raise InvalidArgument(f"{MODEL_VARIABLE}={named}: {needed} is not there, expected a Hugging Face model")
    if not any(path.glob("*.safetensors")):
        raise InvalidArgument(f"{MODEL_VARIABLE}={named}: no weights (*.safetensors)")
    return path


def local_text() -> str:
    """The text named by KVPOOL_SPARSE_TEXT. Raises InvalidArgument where it is missing."""
    named = os.environ.get(TEXT_VARIABLE)
    if not named or not Path(named).is_file():
        raise InvalidArgument(f"{TEXT_VARIABLE}={named or ''}: no such file, expected a text for the model to read")
    return Path(named).read_text(errors="replace")


def local_samples(path: Path, text: str, tokens: int) -> list[Samples]:
    """Samples of each layer of attention, the last tokens of the text being the queries; at most `tokens` of it are read.

    Raises InvalidArgument where transformers is missing, the text is too short, or the model does not use the registry.
    """
    try:
        import torch  # an optional heavy dependency
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise InvalidArgument("a local model needs torch and transformers: pip install 'kvpool[demo]'") from error
    capture = _Capture()
    AttentionInterface.register(_ATTENTION, capture.attend)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    read = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if read.shape[1] < TOKENS_MIN:
        raise InvalidArgument(f"the text has {read.shape[1]} tokens, expected {TOKENS_MIN} and more")
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, attn_implementation=_ATTENTION)
    with torch.inference_mode():
        model(read, logits_to_keep=1)
    if not capture.samples:
        raise InvalidArgument(f"{path}: no layer took its attention from the registry of transformers")
    return capture.samples


class _Capture:
    """Attention that computes what the model expects, and keeps samples of each layer."""

    def __init__(self) -> None:
        self.samples: list[Samples] = []

    def attend(self, _module: Any, *states: Any, **options: Any) -> Any:
        """Dense causal attention on query, key and value [1, heads, n, D]; the output [1, n, heads, D], and no weights.

        The mask that comes with them is not looked at: it is causal, or it has pads, and this text has none.
        """
        import torch  # an optional heavy dependency

        query, key, value = states[:3]
        assert query.shape[0] == 1, "one text"
        if options.get("sliding_window"):
            raise InvalidArgument("a layer of this model has a sliding window: it needs no recall")
        group = query.shape[1] // key.shape[1]
        wide_key, wide_value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scaling = options.get("scaling")
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, wide_key, wide_value, is_causal=True, scale=scaling
        )
        length, dim = query.shape[2], query.shape[3]
        asked = np.arange(length - QUERIES, length)
        factor = 1.0 if scaling is None else float(scaling) * dim**0.5
        self.samples.append(
            Samples(
                keys=key[0].float().numpy(),
                values=value[0].float().numpy(),
                queries=np.ascontiguousarray(query[0, :, asked].float().transpose(0, 1).numpy()) * np.float32(factor),
                visible=asked + 1,
                needles=np.full(QUERIES, -1),
            )
        )
        return attended.transpose(1, 2).contiguous(), None
