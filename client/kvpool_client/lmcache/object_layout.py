"""Object layout: what the bytes of LMCache's memory objects are, as a Layout of the pool, and where they lie.

An object is one chunk of one packed layer: opaque bytes, as many as its shapes and types have. Those are in the Layout's
format, so only objects of the same shapes and types are shared. Of those that LMCache has serialized ("serde") it has what they
were made of too, as LMCache describes it to lookups; how they were serialized is not known, nor which of the 8-bit formats
`uint8` stands for: the operator's `revision` has to (`is_ambiguous`). LMCache does not pass how many tokens an object has: it
counts as one.

Objects lie in LMCache's L1, host memory that stays mapped. LMCache may free one while its task is open, and give its bytes to
another: whoever moves bytes looks before and afterwards (`are_valid`). Pure but for reading the attributes of
objects; keeps none. Any thread.
"""

import hashlib
from collections.abc import Iterable
from math import gcd
from typing import Any, NamedTuple

from kvpool.errors import LayoutMismatch
from kvpool.layout import Layout

_BYTES = "torch.uint8"


class Form(NamedTuple):
    """The shapes and types of an object, LMCache's own. `origin`: of one that was serialized, what it was made of, or SEVERAL;
    None where that was never described, and a lookup that describes it does not find it."""

    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    origin: "Form | None" = None


FORMAT_BYTES_MAX = 200
_HEAD_DIM_MAX = 1 << 16


# The origin of an object of which LMCache has described more than one.
SEVERAL = Form((), ())


def form_of(described: Any) -> Form | None:
    """The shapes and types of a MemoryLayoutDesc; None for one without any, which stands for nothing."""
    form = Form(tuple(described.shapes), tuple(described.dtypes))
    return form if form.shapes else None


def form_of_object(memory: Any) -> Form:
    """The shapes and types of a memory object."""
    meta = memory.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return Form(tuple(meta.shapes), tuple(meta.dtypes))
    return Form((meta.shape,), (meta.dtype,))


def is_serialized(form: Form) -> bool:
    """Whether these are bytes in a row, as LMCache has them where it serializes; KV has more axes."""
    return [str(dtype) for dtype in form.dtypes] == [_BYTES] and len(form.shapes[0]) == 1


def is_ambiguous(form: Form) -> bool:
    """Whether what the bytes mean is not in the form."""
    return any(str(dtype) == _BYTES for dtype in form.dtypes)


def bytes_of(form: Form) -> int:
    """The bytes of an object."""
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(form.shapes, form.dtypes, strict=True))


def words_of(form: Form) -> str:
    """The form in words; no two forms have the same."""
    shapes = _joined("x".join(map(str, shape)) for shape in form.shapes)
    origin = "" if form.origin is None else f" of {words_of(form.origin)}"
    return f"{shapes} {_joined(map(str, form.dtypes))}{origin}"


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


def are_valid(memories: Iterable[Any]) -> bool:
    """Whether LMCache has freed none of these objects: their bytes are still theirs."""
    return all(memory.is_valid() for memory in memories)


def address_of(memory: Any, size: int) -> int:
    """Where an object's bytes begin. Raises LayoutMismatch for one that has fewer, or has them on a device."""
    raw = memory.raw_data
    if raw is None or not raw.is_contiguous() or raw.device.type != "cpu":
        raise LayoutMismatch("memory: an object's bytes are not in host memory: run LMCache with an L1 in DRAM")
    if raw.nbytes < size:
        raise LayoutMismatch(f"memory: an object has {raw.nbytes} bytes, expected {size} by its shapes")
    return int(raw.data_ptr())


def _format_of(form: Form) -> str:
    words = f"lmcache-1 {words_of(form)}"
    if len(words.encode()) <= FORMAT_BYTES_MAX:
        return words
    return f"lmcache-1 {hashlib.blake2b(words.encode(), digest_size=32).hexdigest()}"


def _joined(words: Iterable[str]) -> str:
    return "+".join(words)
