"""Summaries of a layout's blocks: their forms, what they can be made of, and their size.

The bytes are those of native/sparse/summary_format.h. Pure; any thread.
"""

from typing import TYPE_CHECKING

from kvpool.errors import InvalidArgument

if TYPE_CHECKING:  # it imports this module
    from kvpool.layout import Layout

SUMMARY_FORMS = ("mean", "clusters7")
SUMMARY_DTYPES = ("float32", "float16", "bfloat16")
SUMMARY_BLOCK_TOKENS_MIN, SUMMARY_BLOCK_TOKENS_MAX = 16, 128
SUMMARY_CHANNELS = 32  # that have a scale together
SUMMARY_HEAD_DIM_MAX = 256
SUMMARY_KV_HEADS_MAX = 1024
_CLUSTERS = 7


def summary_bytes_of(form: str, head_dim: int) -> int:
    """Bytes of the summary of one block of one KV head; 0 without a form."""
    groups = head_dim // SUMMARY_CHANNELS
    if form == "clusters7":
        keys = (_CLUSTERS + 1) * (head_dim + 2 * groups)  # means in bytes, and the variances by channel
        values = 4 * head_dim + 2 * _CLUSTERS * groups  # means in half bytes, and one that is unused
        return keys + values + 2 * _CLUSTERS + _CLUSTERS
    return 2 * head_dim if form else 0


def check_summaries(layout: "Layout") -> None:
    """Check that such KV can be summarised. Raises InvalidArgument."""
    if layout.summaries not in SUMMARY_FORMS:
        raise InvalidArgument(
            f"layout summaries is {layout.summaries!r}, expected one of {', '.join(SUMMARY_FORMS)}, or nothing"
        )
    if layout.planes != 2:
        raise unfit_for_summaries(layout, "planes", "2: K and V")
    if layout.is_packed:
        raise unfit_for_summaries(layout, "block_tokens", "None: a packed block's bytes are opaque")
    if layout.dtype not in SUMMARY_DTYPES:
        raise unfit_for_summaries(layout, "dtype", f"one of {', '.join(SUMMARY_DTYPES)}")
    if layout.head_dim % SUMMARY_CHANNELS or layout.head_dim > SUMMARY_HEAD_DIM_MAX:
        raise unfit_for_summaries(
            layout, "head_dim", f"a multiple of {SUMMARY_CHANNELS}, at most {SUMMARY_HEAD_DIM_MAX}"
        )
    if layout.kv_heads > SUMMARY_KV_HEADS_MAX:
        raise unfit_for_summaries(layout, "kv_heads", f"at most {SUMMARY_KV_HEADS_MAX}")
    if layout.summary_block_tokens < SUMMARY_BLOCK_TOKENS_MIN:
        raise unfit_for_summaries(layout, "chunk_tokens", f"a multiple of {SUMMARY_BLOCK_TOKENS_MIN}")


def unfit_for_summaries(layout: "Layout", name: str, expected: str) -> InvalidArgument:
    """The error of a field that does not go with summaries."""
    value = getattr(layout, name)
    shown = repr(value) if isinstance(value, str) else value
    return InvalidArgument(f"layout {name} is {shown} with summaries {layout.summaries!r}, expected {expected}")
