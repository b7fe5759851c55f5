"""Object layout: what the bytes of LMCache's memory objects are, as a Layout of the pool, and where they lie.

An object is one chunk of one packed layer: opaque bytes, as many as its shapes and types have. Those are in the Layout's
format, so only objects of the same shapes and types are shared. LMCache does not pass how many tokens an object has: it counts
as one.

Objects lie in LMCache's L1, host memory that stays where it is while a task is open. Pure but for reading the attributes of
objects; keeps none. Any thread.
"""

import hashlib
from collections.abc import Iterable
from math import gcd
from typing import Any

from kvpool.errors import LayoutMismatch
from kvpool.layout import Layout

# The shapes and types of an object, LMCache's own.
Form = tuple[tuple[Any, ...], tuple[Any, ...]]
FORMAT_BYTES_MAX = 200
_HEAD_DIM_MAX = 1 << 16


def form_of(described: Any) -> Form | None:
    """The shapes and types of a MemoryLayoutDesc; None for one without any, which stands for nothing."""
    form = tuple(described.shapes), tuple(described.dtypes)
    return form if form[0] else None


def form_of_object(memory: Any) -> Form:
    """The shapes and types of a memory object."""
    meta = memory.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return tuple(meta.shapes), tuple(meta.dtypes)
    return (meta.shape,), (meta.dtype,)


def bytes_of(form: Form) -> int:
    """The bytes of an object."""
    shapes, dtypes = form
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True))


def layout_of(form: Form) -> Layout:
    """The Layout of such objects. Raises InvalidArgument for a size that no chunk has."""
    size = bytes_of(form)
    head_dim = gcd(size, _HEAD_DIM_MAX) or 1
    return Layout(
        layers=1,
        kv_heads=size // head_dim,
        head_dim=head_dim,
        dtype="uint8",
        chunk_tokens=1,
        planes=1,
        format=_format_of(form),
        block_tokens=1,
    )


def address_of(memory: Any, size: int) -> int:
    """Where an object's bytes begin. Raises LayoutMismatch for one that has fewer, or has them on a device."""
    raw = memory.raw_data
    if raw is None or not raw.is_contiguous() or raw.device.type != "cpu":
        raise LayoutMismatch("memory: an object's bytes are not in host memory: run LMCache with an L1 in DRAM")
    if raw.nbytes < size:
        raise LayoutMismatch(f"memory: an object has {raw.nbytes} bytes, expected {size} by its shapes")
    return int(raw.data_ptr())


def _format_of(form: Form) -> str:
    words = f"lmcache-1 {_joined('x'.join(map(str, shape)) for shape in form[0])} {_joined(map(str, form[1]))}"
    if len(words.encode()) <= FORMAT_BYTES_MAX:
        return words
    return f"lmcache-1 {hashlib.blake2b(words.encode(), digest_size=32).hexdigest()}"


def _joined(words: Iterable[str]) -> str:
    return "+".join(words)
