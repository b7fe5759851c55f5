"""Engine memory: each form's geometry, checked byte by byte against indexing, and what is refused."""

import itertools
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.errors import InvalidArgument, LayoutMismatch
from kvpool.layout import Layout
from kvpool_client.copying import buffers
from kvpool_client.copying.buffers import PagedGeometry, contiguous_address, describe_layers

LAYOUT = Layout(layers=2, kv_heads=3, head_dim=4, dtype="float16", chunk_tokens=32)
MLA = Layout(layers=2, kv_heads=1, head_dim=12, dtype="float16", chunk_tokens=32, planes=1)
PACKED = Layout(layers=2, kv_heads=3, head_dim=4, dtype="float16", chunk_tokens=32, format="x", block_tokens=8)
BLOCKS, TOKENS = 5, 8

Array = npt.NDArray[Any]


def _layers(shape: tuple[int, ...], dtype: str = "float16") -> list[Array]:
    return [np.arange(np.prod(shape)).astype(dtype).reshape(shape) + layer for layer in range(2)]


def _block_address(geometry: PagedGeometry, layer: int, plane: int, block: int) -> int:
    return geometry.addresses[layer] + plane * geometry.plane_stride + block * geometry.block_stride


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@pytest.mark.parametrize("tail", [(3, 4), (12,), (3, 2, 2), (3, 1, 4), (1, 12, 1)])
@pytest.mark.parametrize("form", ["auto", "kv_first"])
def test_kv_first(tail: tuple[int, ...], form: str) -> None:
    layers = _layers((2, BLOCKS, TOKENS, *tail))
    geometry = describe_layers(layers, LAYOUT, TOKENS, form)
    assert (geometry.form, geometry.blocks, geometry.plane_block_bytes, geometry.device) == ("kv_first", 5, 192, "cpu")
    for layer, plane, block in itertools.product(range(2), range(2), range(BLOCKS)):
        assert _block_address(geometry, layer, plane, block) == _address(layers[layer][plane, block])


@pytest.mark.parametrize("form", ["auto", "block_first"])
def test_block_first(form: str) -> None:
    layers = _layers((BLOCKS, 2, TOKENS, 3, 4))
    geometry = describe_layers(layers, LAYOUT, TOKENS, form)
    assert (geometry.form, geometry.planes, geometry.block_tokens) == ("block_first", 2, TOKENS)
    for layer, plane, block in itertools.product(range(2), range(2), range(BLOCKS)):
        assert _block_address(geometry, layer, plane, block) == _address(layers[layer][block, plane])


def test_one_plane() -> None:
    layers = _layers((BLOCKS, TOKENS, 12))
    geometry = describe_layers(layers, MLA, TOKENS, "auto")
    assert (geometry.planes, geometry.blocks, geometry.plane_block_bytes) == (1, 5, 192)
    assert [_block_address(geometry, 1, 0, block) for block in range(5)] == [_address(layers[1][b]) for b in range(5)]


@pytest.mark.parametrize("form", ["auto", "packed"])
@pytest.mark.parametrize("shape", [(BLOCKS, 2, TOKENS, 12), (BLOCKS, 3, 2, 32), (BLOCKS, 192)])
def test_packed_blocks_are_opaque(form: str, shape: tuple[int, ...]) -> None:
    geometry = describe_layers(_layers(shape), PACKED, TOKENS, form)
    assert (geometry.form, geometry.planes, geometry.plane_block_bytes, geometry.blocks) == ("packed", 1, 384, 5)


def test_packed_items_may_have_any_size() -> None:
    geometry = describe_layers(_layers((BLOCKS, 384), "uint8"), PACKED, TOKENS, "auto")
    assert (geometry.plane_block_bytes, geometry.block_stride) == (384, 384)


def test_gaps_between_blocks_are_strides() -> None:
    whole = _layers((2, 2 * BLOCKS, TOKENS, 12))
    layers = [layer[:, ::2] for layer in whole]
    geometry = describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert (geometry.blocks, geometry.block_stride, geometry.plane_stride) == (BLOCKS, 384, 1920)
    assert _block_address(geometry, 1, 1, 4) == _address(whole[1][1, 8])


def test_layers_of_one_allocation_keep_their_strides() -> None:
    """The cross-layer arrangement: one array [blocks, layers, 2, tokens, …], a layer being a view of it."""
    whole = np.zeros((BLOCKS, 2, 2, TOKENS, 12), np.float16)
    geometry = describe_layers([whole[:, 0], whole[:, 1]], LAYOUT, TOKENS, "auto")
    assert (geometry.form, geometry.block_stride) == ("block_first", 768)
    assert _block_address(geometry, 1, 1, 3) == _address(whole[3, 1, 1])


@pytest.mark.parametrize("swap", [(0, 1), (1, 0)])
def test_the_order_in_memory_may_differ_from_the_order_of_axes(swap: tuple[int, int]) -> None:
    """A [2, blocks, …] view of memory that lies as [blocks, 2, …], as engines make them, is still kv_first."""
    layers = [np.zeros((BLOCKS, 2, TOKENS, 12), np.float16).transpose(1, 0, 2, 3) for _ in range(2)]
    geometry = describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert (geometry.form, geometry.plane_stride, geometry.block_stride) == ("kv_first", 192, 384)
    assert _block_address(geometry, 0, *swap) == _address(layers[0][swap])


def test_an_ambiguous_shape_needs_its_form() -> None:
    layers = _layers((2, 2, TOKENS, 12))
    with pytest.raises(LayoutMismatch, match="pass form="):
        describe_layers(layers, LAYOUT, TOKENS, "auto")
    assert describe_layers(layers, LAYOUT, TOKENS, "kv_first").plane_stride == 384
    assert describe_layers(layers, LAYOUT, TOKENS, "block_first").plane_stride == 192


@pytest.mark.parametrize(
    "layers",
    [
        _layers((2, BLOCKS, TOKENS, 11)),
        _layers((2, BLOCKS, 2 * TOKENS, 12)),
        _layers((3, BLOCKS, TOKENS, 12)),
        _layers((BLOCKS, TOKENS, 12)),
        _layers((2, BLOCKS, TOKENS, 12), "float32"),
        _layers((2, BLOCKS, TOKENS, 12))[:1],
        [*_layers((2, BLOCKS, TOKENS, 12)), np.zeros((2, BLOCKS, TOKENS, 12), np.float16)],
        [_layers((2, 5, TOKENS, 12))[0], _layers((2, 6, TOKENS, 12))[0]],
        [_layers((2, 5, TOKENS, 12))[0], _layers((2, 10, TOKENS, 12))[0][:, ::2]],
        [layer[..., ::2] for layer in _layers((2, BLOCKS, TOKENS, 24))],
        [layer.swapaxes(2, 3) for layer in _layers((2, BLOCKS, 12, TOKENS))],
        [layer[:, ::-1] for layer in _layers((2, BLOCKS, TOKENS, 12))],
        [np.lib.stride_tricks.as_strided(x, (2, 5, 8, 12), (960, 96, 24, 2)) for x in _layers((2, 5, 8, 12))],
        [np.zeros((), np.float16)] * 2,
        [],
    ],
    ids=[
        "token size",
        "block tokens",
        "planes",
        "missing planes",
        "item size",
        "too few",
        "too many",
        "shapes differ",
        "strides differ",
        "gaps in a token",
        "token axis inside",
        "backwards",
        "overlapping",
        "no axes",
        "no layers",
    ],
)
def test_arrays_that_do_not_fit_are_refused(layers: list[Array]) -> None:
    with pytest.raises(LayoutMismatch):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


HEADS, DIM = LAYOUT.kv_heads, LAYOUT.head_dim
ONE_HEAD_A_GROUP = replace(LAYOUT, head_groups=HEADS)


@pytest.mark.parametrize("form", ["auto", "kv_first"])
@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (
            (DIM, HEADS),
            r"ends in \(4, 3\) .*, expected 3 heads of 4 items, or one axis of 12: its heads and dims are swapped$",
        ),
        ((6, 2), r"ends in \(6, 2\) .*, expected 3 heads of 4 items, or one axis of 12$"),
        ((2, 2, 3), "or one axis of 12$"),
    ],
)
def test_other_heads_and_dims_of_as_many_bytes_are_refused(form: str, tail: tuple[int, ...], words: str) -> None:
    for layout in (LAYOUT, ONE_HEAD_A_GROUP):
        layers = _layers((2, BLOCKS, TOKENS, *tail))
        with pytest.raises(LayoutMismatch, match=words):
            describe_layers(layers, layout, TOKENS, form, has_head_groups=layout.head_groups > 1)


@pytest.mark.parametrize("form", ["auto", "named"])
@pytest.mark.parametrize(
    ("axes", "name", "swap"),
    [((2, BLOCKS), "kv_first", "2, 3"), ((BLOCKS, 2), "block_first", "2, 3"), ((BLOCKS,), "kv_first", "1, 2")],
)
def test_heads_before_tokens_are_refused_and_their_view_is_served(
    axes: tuple[int, ...], name: str, swap: str, form: str
) -> None:
    form = name if form == "named" else form
    layers = _layers((*axes, HEADS, TOKENS, DIM))
    seen = [layer.swapaxes(-3, -2) for layer in layers]
    for whole in (LAYOUT, ONE_HEAD_A_GROUP):
        layout = replace(whole, planes=len(axes))
        has_head_groups = whole is ONE_HEAD_A_GROUP
        cure = rf"heads come before its tokens: pass the view swapaxes\({swap}\)"
        with pytest.raises(LayoutMismatch, match=cure + ("$" if has_head_groups else ".*head_groups=kv_heads$")):
            describe_layers(layers, layout, TOKENS, form, has_head_groups=has_head_groups)
        if has_head_groups:
            geometry = describe_layers(seen, layout, TOKENS, form, has_head_groups=True)
            for layer, head in itertools.product(range(2), range(HEADS)):
                place = (0,) * len(axes) + (head,)
                assert geometry.addresses[layer * HEADS + head] == _address(layers[layer][place])
            assert (geometry.form, geometry.runs, geometry.plane_block_bytes) == (name, 1, TOKENS * DIM * 2)
        else:
            with pytest.raises(LayoutMismatch, match=r"leave gaps .*head_groups=kv_heads$"):
                describe_layers(seen, layout, TOKENS, form)


@pytest.mark.parametrize("dim", [4, TOKENS])
@pytest.mark.parametrize(
    ("axes", "name"), [((2, BLOCKS), "kv_first"), ((BLOCKS, 2), "block_first"), ((BLOCKS,), "kv_first")]
)
def test_axes_that_the_shape_cannot_show_must_be_named(dim: int, axes: tuple[int, ...], name: str) -> None:
    heads = TOKENS
    layout = replace(LAYOUT, kv_heads=heads, head_dim=dim, planes=len(axes))
    layers = _layers((*axes, TOKENS, heads, dim))
    with pytest.raises(
        LayoutMismatch, match=rf"reads as \[tokens, heads, dim\] and as \[heads, tokens, dim\]: pass form='{name}' if"
    ):
        describe_layers(layers, layout, TOKENS, "auto")
    assert describe_layers(layers, layout, TOKENS, name).form == name
    together = [layer.reshape(*axes, TOKENS, heads * dim) for layer in layers]
    assert describe_layers(together, layout, TOKENS, "auto").form == name


def _differing(name: str) -> list[Any]:
    zeros = np.zeros((2, BLOCKS, TOKENS, 12), np.float16)
    other = {
        "shape": np.zeros((2, BLOCKS, TOKENS, 3, 4), np.float16),
        "dtype": zeros.view(np.uint16).copy(),
        "strides": np.zeros((2, 2 * BLOCKS, TOKENS, 12), np.float16)[:, ::2],
        "device": OnDevice(zeros.copy()),
    }
    return [zeros, other[name]]


@pytest.mark.usefixtures("_device_one")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape", r"layer 1 has shape \(2, 5, 8, 3, 4\) of .*, layer 0 has shape \(2, 5, 8, 12\)"),
        ("dtype", "layer 1 has shape .* of uint16 .*, layer 0 has .* of float16 "),
        ("strides", r"layer 1 has .* strides \(1920, 384, 24, 2\) .*, layer 0 has .* strides \(960, 192, 24, 2\) "),
        ("device", "layer 1 has .* on cuda:1, layer 0 has .* on cpu: expected all alike, or a Layout with groups$"),
    ],
)
def test_layers_that_differ_are_named_with_what_differs(name: str, words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        describe_layers(_differing(name), LAYOUT, TOKENS, "auto")


_ROWS = np.zeros((2, 4 * BLOCKS, TOKENS, 12), np.float16)


@pytest.mark.parametrize(
    "layers",
    [
        [_ROWS, _ROWS],
        [_ROWS[:, :BLOCKS], _ROWS[:, BLOCKS - 1 : 2 * BLOCKS - 1]],
        [_ROWS[:, : 2 * BLOCKS : 2], _ROWS[:, 2 : 2 * BLOCKS + 2 : 2]],
        [
            _ROWS.reshape(-1)[: 2 * BLOCKS * 96].reshape(2, BLOCKS, 8, 12),
            _ROWS.reshape(-1)[95 : 95 + 960].reshape(2, 5, 8, 12),
        ],
    ],
    ids=["twice the same", "a block in common", "interleaved", "an item in common"],
)
@pytest.mark.parametrize("order", [1, -1])
def test_layers_with_a_byte_in_common_are_refused(layers: list[Array], order: int) -> None:
    with pytest.raises(LayoutMismatch, match="layers 0 and 1 overlap in memory, expected memory of its own for each"):
        describe_layers(layers[::order], LAYOUT, TOKENS, "kv_first")


def test_layers_between_each_others_blocks_are_apart() -> None:
    layers = [_ROWS[:, : 2 * BLOCKS : 2], _ROWS[:, 1 : 2 * BLOCKS : 2]]
    assert describe_layers(layers, LAYOUT, TOKENS, "kv_first").block_stride == 384
    by_token = np.zeros((2, BLOCKS, TOKENS, 2, HEADS, DIM), np.float16)
    layers = [by_token[:, :, :, number] for number in range(2)]
    geometry = describe_layers(layers, ONE_HEAD_A_GROUP, TOKENS, "kv_first", has_head_groups=True)
    assert (geometry.runs, geometry.run_stride) == (TOKENS, 48)


PACKED_ONLY, BOTH, NEITHER = (False, True), (True, True), (False, False)


@pytest.mark.parametrize(
    ("stored", "named", "is_taken"),  # by a plain and by a packed layout
    [
        ("bfloat16", "float16", NEITHER),  # 1.5 would be loaded as 0.125
        ("bfloat16", "int16", PACKED_ONLY),
        ("bfloat16", "uint16", BOTH),
        ("bfloat16", "V2", BOTH),  # so array interfaces show it
        ("float16", "V2", PACKED_ONLY),
        ("float16", "float16", BOTH),
        ("float16", ">f2", NEITHER),
        ("float8_e4m3fn", "int8", PACKED_ONLY),
        ("float8_e4m3fn", "uint8", BOTH),
        ("float8_e5m2", "V1", BOTH),
        ("int8", "uint8", BOTH),
        ("uint8", "int8", BOTH),
        ("float32", "int32", PACKED_ONLY),
        ("float32", [("key", "f2"), ("value", "f2")], NEITHER),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_items_are_those_of_the_layout_or_its_bits(
    stored: str, named: Any, is_taken: tuple[bool, bool], is_packed: bool
) -> None:
    layout = replace(PACKED if is_packed else LAYOUT, dtype=stored)
    layers = [np.zeros((2, BLOCKS, TOKENS, 12), named) for _ in range(2)]
    if is_packed:
        layers = [layer.reshape(BLOCKS, -1) for layer in layers]
    if is_taken[is_packed]:
        assert describe_layers(layers, layout, TOKENS, "auto").blocks == BLOCKS
    else:
        bits = f"uint{8 * np.dtype(named).itemsize}"
        with pytest.raises(
            LayoutMismatch, match=f"items are .*, expected the layout's {stored}, or {bits} for its bits"
        ):
            describe_layers(layers, layout, TOKENS, "auto")


def test_a_dtype_is_named_with_its_byte_order() -> None:
    layers = [np.zeros((2, BLOCKS, TOKENS, 12), ">f2") for _ in range(2)]
    with pytest.raises(
        LayoutMismatch, match="items are float16 of the other byte order, expected the layout's float16"
    ):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


@pytest.mark.parametrize(
    ("layout", "block_tokens", "form"),
    [
        (LAYOUT, 5, "auto"),
        (LAYOUT, 64, "auto"),
        (LAYOUT, TOKENS, "block_first"),
        (LAYOUT, TOKENS, "packed"),
        (PACKED, 16, "auto"),
        (PACKED, TOKENS, "kv_first"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(layout: Layout, block_tokens: int, form: str) -> None:
    with pytest.raises(LayoutMismatch):
        describe_layers(_layers((2, BLOCKS, TOKENS, 12)), layout, block_tokens, form)


@pytest.mark.parametrize(("block_tokens", "form"), [(0, "auto"), (True, "auto"), (8.0, "auto"), (8, "nhd")])
def test_meaningless_arguments_are_refused(block_tokens: int, form: str) -> None:
    with pytest.raises(InvalidArgument):
        describe_layers(_layers((2, BLOCKS, TOKENS, 12)), LAYOUT, block_tokens, form)


@pytest.mark.parametrize("layer", [None, 7, {}, [1, 2], b"read-only bytes"], ids=str)
def test_a_value_that_is_no_array_is_refused(layer: object) -> None:
    with pytest.raises(InvalidArgument):
        describe_layers([layer, layer], LAYOUT, TOKENS, "auto")


def test_read_only_memory_is_refused() -> None:
    layers = _layers((2, BLOCKS, TOKENS, 12))
    layers[1].flags.writeable = False
    with pytest.raises(InvalidArgument, match="layer 1 is read-only"):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


def test_a_flat_target_is_used_at_its_address() -> None:
    array = np.zeros((3, LAYOUT.chunk_bytes), np.uint8)
    assert contiguous_address(array, LAYOUT, "into", is_target=True) == (_address(array), 3)
    assert contiguous_address(array[1:], LAYOUT, "into", is_target=True) == (_address(array) + LAYOUT.chunk_bytes, 2)


def test_only_a_source_may_be_read_only() -> None:
    array = np.zeros((1, LAYOUT.chunk_bytes), np.uint8)
    array.flags.writeable = False
    assert contiguous_address(array, LAYOUT, "from_", is_target=False) == (_address(array), 1)
    with pytest.raises(InvalidArgument, match="into is read-only"):
        contiguous_address(array, LAYOUT, "into", is_target=True)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(LAYOUT.chunk_bytes, np.uint8),
        np.zeros((2, LAYOUT.chunk_bytes - 1), np.uint8),
        np.zeros((2, LAYOUT.chunk_bytes), np.uint16),
        np.zeros((2, LAYOUT.chunk_bytes), np.int8),
        np.zeros((2, LAYOUT.chunk_bytes), np.bool_),
        np.zeros((2, LAYOUT.chunk_bytes), "V1"),
        np.zeros((4, LAYOUT.chunk_bytes), np.uint8)[::2],
        np.zeros((LAYOUT.chunk_bytes, 2), np.uint8).T,
        bytearray(LAYOUT.chunk_bytes),
        None,
    ],
    ids=["one axis", "size", "items", "signed", "truth values", "no name", "gaps", "order", "bytes", "nothing"],
)
def test_a_flat_target_of_another_form_is_refused(array: object) -> None:
    with pytest.raises(InvalidArgument):
        contiguous_address(array, LAYOUT, "into", is_target=True)


class OnDevice:
    """An array that its library has put on a CUDA device, as this interface describes it."""

    def __init__(self, array: Array, **changes: object) -> None:
        data = (array.__array_interface__["data"][0], False)
        described = {"shape": array.shape, "typestr": array.dtype.str, "data": data, "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**described, **changes}


@pytest.fixture
def _device_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows every address as one of its second device."""
    monkeypatch.setattr(buffers, "ordinal_of", lambda address: 1 if address else None)


@pytest.mark.usefixtures("_device_one")
@pytest.mark.parametrize("form", ["kv_first", "block_first"])
@pytest.mark.parametrize("has_strides", [False, True])
def test_an_array_on_a_device_has_the_geometry_of_one_in_host_memory(form: str, has_strides: bool) -> None:
    axes = (2, BLOCKS) if form == "kv_first" else (BLOCKS, 2)
    host = _layers((*axes, TOKENS, 3, 4))
    changes = {"strides": host[0].strides} if has_strides else {"version": 2}
    geometry = describe_layers([OnDevice(array, **changes) for array in host], LAYOUT, TOKENS, form)
    assert geometry.device == "cuda:1"
    assert geometry == replace(describe_layers(host, LAYOUT, TOKENS, form), device="cuda:1")


@pytest.mark.usefixtures("_device_one")
def test_arrays_of_a_type_that_numpy_lacks_count_by_their_size() -> None:
    """bfloat16 of other libraries is two opaque bytes."""
    layers = [OnDevice(array, typestr="|V2") for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    layout = replace(LAYOUT, dtype="bfloat16")
    assert describe_layers(layers, layout, TOKENS, "auto").plane_block_bytes == 192


@pytest.mark.usefixtures("_device_one")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": (0, False)}, "no device memory"),
        ({"data": (64, True)}, "read-only"),
        ({"mask": object()}, "masked"),
        ({"typestr": "quaternion"}, "cannot be read"),
        ({"strides": (2, 2)}, "5 dimensions and 2 strides"),
        ({"shape": "wide"}, "cannot be read"),
    ],
)
def test_an_array_that_cannot_be_used_is_refused_in_words(changes: dict[str, object], words: str) -> None:
    layers = [OnDevice(array, **changes) for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    with pytest.raises(InvalidArgument, match=words):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


@pytest.mark.usefixtures("_device_one")
def test_a_contiguous_array_is_in_host_memory() -> None:
    rows = np.zeros((2, LAYOUT.chunk_bytes), np.uint8)
    with pytest.raises(InvalidArgument, match="is on cuda:1, expected host memory"):
        contiguous_address(OnDevice(rows), LAYOUT, "into", is_target=True)


def test_a_process_without_a_driver_learns_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CUDA_DRIVER", "/no/such/libcuda.so")
    layers = [OnDevice(array) for array in _layers((BLOCKS, 2, TOKENS, 3, 4))]
    with pytest.raises(InvalidArgument, match=r"/no/such/libcuda\.so.*KVPOOL_CUDA_DRIVER"):
        describe_layers(layers, LAYOUT, TOKENS, "auto")


class Exchanged:
    """An array of a library that offers DLPack alone."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize(("dtype", "is_taken"), [("float16", True), ("uint16", True), ("int16", False)])
def test_arrays_by_dlpack_are_of_the_layouts_dtype_or_its_bits(dtype: str, is_taken: bool) -> None:
    host = [np.zeros((2, BLOCKS, TOKENS, HEADS, DIM), dtype) for _ in range(2)]
    layers = [Exchanged(array) for array in host]
    if is_taken:
        assert describe_layers(layers, LAYOUT, TOKENS, "auto") == describe_layers(host, LAYOUT, TOKENS, "auto")
    else:
        with pytest.raises(LayoutMismatch, match=f"items are {dtype}, expected the layout's float16, or uint16"):
            describe_layers(layers, LAYOUT, TOKENS, "auto")


@pytest.mark.parametrize("form", ["kv_first", "block_first"])
def test_planes_and_blocks_that_overlap_together_are_refused(form: str) -> None:
    """Each step alone is as long as a plane of a block: the next block's first plane is this one's second."""
    plane = TOKENS * 12
    memory = np.zeros(plane * (BLOCKS + 1), np.float16)
    steps = (plane * 2, plane * 2, 24, 8, 2)
    shape = (2, BLOCKS, TOKENS, 3, 4) if form == "kv_first" else (BLOCKS, 2, TOKENS, 3, 4)
    layers = [np.lib.stride_tricks.as_strided(memory.copy(), shape, steps) for _ in range(2)]
    with pytest.raises(LayoutMismatch, match="make blocks, planes or heads overlap"):
        describe_layers(layers, LAYOUT, TOKENS, form)


def test_integers_of_numpy_are_integers() -> None:
    layers = _layers((2, BLOCKS, TOKENS, 3, 4))
    assert describe_layers(layers, LAYOUT, cast(int, np.int64(TOKENS)), "auto").block_tokens == TOKENS
