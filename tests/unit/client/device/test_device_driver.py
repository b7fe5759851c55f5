"""The driver of a process: what is refused at `register`, and that a device is opened once."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool_client as kv
import kvpool_native
from kvpool.errors import InvalidArgument
from kvpool_client.copying.cache import Cache
from kvpool_client.copying.device.driver import open_device, ordinal_of
from tests.rigs.device import emulated
from tests.rigs.device.engine import DeviceKv, use_emulated_driver
from tests.rigs.runs.children import assert_in_child

LAYOUT = kv.Layout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=32)


def test_a_device_is_opened_once_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_driver(monkeypatch)
    opened = emulated.live()["contexts"]
    first, second, other = open_device("cuda:0"), open_device("cuda"), open_device("cuda:1")
    assert first is second
    assert (first.ordinal, other.ordinal) == (0, 1)
    del first, second, other
    gc.collect()
    assert emulated.live()["contexts"] == opened


def test_an_address_belongs_to_a_device_or_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_driver(monkeypatch)
    last = emulated.count_devices() - 1
    memory = open_device(f"cuda:{last}").allocate(100)
    assert ordinal_of(memory.address) == last
    assert ordinal_of(kvpool_native.Mapping.create("here", 4096).view().ctypes.data) is None


@pytest.mark.parametrize("name", ["xpu:0", "mps", "meta", "cuda:x"])
def test_another_kind_of_device_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"on {name}, expected host memory or a CUDA device"):
        open_device(name)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("fail cuInit 0 100", "CUDA_ERROR_NO_DEVICE"),
        ("fail cuDevicePrimaryCtxRetain 0 2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("fail cuStreamCreate 0 2", "cuStreamCreate failed"),
    ],
)
def test_a_driver_that_refuses_is_the_callers_to_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str, words: str
) -> None:
    library = tmp_path / "libcuda.so.1"  # a name of its own, under which no device is open
    library.symlink_to(emulated.driver_path())
    monkeypatch.setenv("KVPOOL_CUDA_DRIVER", str(library))
    arrays: list[Any] = [Tensor(0), Tensor(1)]
    emulated.order(order)
    try:
        with pytest.raises(InvalidArgument, match=f"{library}.*{words}.*KVPOOL_CUDA_DRIVER"):
            Cache(arrays, LAYOUT, block_tokens=16, form="kv_first")
    finally:
        emulated.order("clear 1")


@pytest.mark.parametrize("library", ["/no/such/libcuda.so.1", "libc.so.6"])
def test_a_library_that_is_no_driver_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setenv("KVPOOL_CUDA_DRIVER", library)
    with pytest.raises(InvalidArgument, match=f"{library}.*KVPOOL_CUDA_DRIVER"):
        Cache([Tensor(0), Tensor(1)], LAYOUT, block_tokens=16, form="kv_first")


def test_an_ordinal_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_driver(monkeypatch)
    with pytest.raises(InvalidArgument, match="cuda:7"):
        open_device("cuda:7")


def test_a_forked_child_has_none_of_its_parents_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA itself serves no child of a process that has used it; the emulated driver does."""
    use_emulated_driver(monkeypatch)
    device, engine = open_device("cuda:0"), DeviceKv(LAYOUT, "kv_first", 4)

    def has_another() -> bool:
        try:
            return open_device("cuda:0") is not device
        except InvalidArgument:
            return bool(emulated.REAL)

    assert_in_child(has_another)
    assert all(not layer.any() for layer in engine.read())


class Tensor:
    """A torch tensor on the first device, as far as its geometry goes."""

    shape = (2, 4, 16, 2, 16)
    device = "cuda:0"
    dtype = "torch.uint16"

    def __init__(self, number: int) -> None:
        self._number = number

    def data_ptr(self) -> int:
        return (1 + self._number) << 40

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (4 * 16 * 2 * 16, 16 * 2 * 16, 2 * 16, 16, 1)


def test_an_array_that_the_driver_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulated_driver(monkeypatch)
    interface = {"shape": (2, 4, 16, 32), "typestr": "<u2", "data": (1 << 20, False), "version": 3}
    arrays = [SimpleNamespace(__cuda_array_interface__=interface) for _ in range(2)]
    with pytest.raises(InvalidArgument, match="no device memory"):
        Cache(arrays, LAYOUT, block_tokens=16, form="kv_first")
