"""Parts of a model's KV that depend on the longest sequence it is served with (`--max-model-len`); others stay the same.

vLLM takes LongRoPE's long factors where that length exceeds the original one, sizes dynamic NTK by it in some models, and tunes
Llama 4's attention above 32 Ki tokens. For an unknown RoPE variant the length itself is included: its KV may depend on it.

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


def _ropes(values: Mapping[str, object], original: object) -> Iterator[tuple[str, object]]:
    """The kind of each RoPE, of sub-models and kinds of layers too, and the length that it was trained with."""
    original = values.get("original_max_position_embeddings", original)
    kind = values.get("rope_type", values.get("type"))
    if isinstance(kind, str):
        yield kind.lower(), original
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _ropes(value, original)


def _all_of(values: Mapping[str, object], name: str) -> Iterator[object]:
    for key, value in values.items():
        if key == name:
            yield value
        elif isinstance(value, Mapping):
            yield from _all_of(value, name)
