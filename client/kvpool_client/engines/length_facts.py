"""Parts of a model's KV that depend on a length, and not on its tokens alone; of most models none does.

Engines take LongRoPE's long factors where a length exceeds the original one, and size dynamic NTK by it: vLLM by the longest
sequence that a model is served with (`--max-model-len`), transformers by the longest of each step, so that there equal tokens
have other KV in longer prompts. vLLM tunes Llama 4's attention above 32 Ki tokens. An unknown RoPE variant may depend on the
length.

Reads attributes alone. Any thread.
"""

from collections.abc import Iterator, Mapping

# Their angles depend on the model's own configuration alone.
INDEPENDENT = {"default", "linear", "llama3", "yarn", "mrope", "ntk", "deepseek_yarn", "proportional", "none", ""}
# Which of two sets of factors applies depends on whether the length exceeds the trained one.
TWO_SETS = {"longrope", "su"}
# vLLM scales queries of such models where they are served beyond this length, unless the model sets it.
TUNED_BEYOND = 32768
TUNED_TYPES = {"llama4", "llama4_text"}
# In the keys of the mappings whose `type` is that of a RoPE: elsewhere, as in quantization, the word has other meanings.
ROPE = "rope"


def configuration_of(hf_config: object) -> Mapping[str, object]:
    """The values of a model's transformers configuration; empty where there is none."""
    if hf_config is None:
        return {}
    as_dict = getattr(hf_config, "to_dict", None)
    values: Mapping[str, object] = as_dict() if callable(as_dict) else vars(hf_config)
    return values


def length_scalings(values: Mapping[str, object]) -> list[str]:
    """The kinds of RoPE in a model's configuration that depend on the length. Empty for most models."""
    return sorted({kind for kind, _ in _ropes(values, None) if kind not in INDEPENDENT})


def length_facts(values: Mapping[str, object], longest: object) -> list[str]:
    """`values`: the model's configuration; `longest`: `max_model_len`. Empty where the KV does not depend on it."""
    facts = set()
    for kind, original in _ropes(values, values.get("original_max_position_embeddings")):
        if kind in TWO_SETS and isinstance(original, int) and isinstance(longest, int):
            facts.add(f"{kind}: {'long' if longest > original else 'short'} factors")
        elif kind not in INDEPENDENT:
            facts.add(f"{kind}: {longest}")
    if isinstance(longest, int) and any(kind in TUNED_TYPES for kind in _all_of(values, "model_type")):
        facts.add(f"attention {'' if longest > TUNED_BEYOND else 'not '}tuned")
    return sorted(facts)


def _ropes(values: Mapping[str, object], original: object, *, is_rope: bool = False) -> Iterator[tuple[str, object]]:
    """The kind of each RoPE, of sub-models and kinds of layers too, and the length that it was trained with."""
    original = values.get("original_max_position_embeddings", original)
    kind = values.get("rope_type", values.get("type") if is_rope else None)
    if isinstance(kind, str):
        yield kind.lower(), original
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _ropes(value, original, is_rope=is_rope or ROPE in str(name))


def _all_of(values: Mapping[str, object], name: str) -> Iterator[object]:
    for key, value in values.items():
        if key == name:
            yield value
        elif isinstance(value, Mapping):
            yield from _all_of(value, name)
