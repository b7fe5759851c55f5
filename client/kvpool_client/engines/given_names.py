"""Names that an operator gives an engine for its model and its deployment: whether they can be that. Pure; any thread."""

# Leaves room for a revision in `kvpool.ids.MODEL_BYTES_MAX`.
MODEL_BYTES_MAX = 300
MODEL_EXPECTED = f"a name of 1 to {MODEL_BYTES_MAX} bytes"


def is_model_name(value: object) -> bool:
    """Whether a value can be a model's name."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= MODEL_BYTES_MAX
