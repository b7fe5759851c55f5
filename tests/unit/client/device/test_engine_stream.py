"""The stream of an engine: torch's current one, an array's own, or the default one."""

import sys
from types import SimpleNamespace

import pytest

from kvpool_client.copying.device.engine_stream import LEGACY_STREAM, engine_stream


class Tensor:
    """A torch tensor on a device, as far as its type goes."""


def test_a_tensor_is_used_on_the_current_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {0: 7, 1: 4096}
    cuda = SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=streams[ordinal]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    assert [engine_stream(Tensor(), ordinal) for ordinal in (0, 1)] == [7, 4096]


@pytest.mark.parametrize(("stream", "expected"), [(None, LEGACY_STREAM), (1, 1), (2, 2), (0x1000, 0x1000)])
def test_an_array_names_its_stream_each_time(stream: int | None, expected: int) -> None:
    array = SimpleNamespace(__cuda_array_interface__={"stream": 99})
    assert engine_stream(array, 0) == 99
    array.__cuda_array_interface__ = {"stream": stream}
    assert engine_stream(array, 0) == expected


def test_an_interface_without_a_stream_means_the_default_one() -> None:
    assert engine_stream(SimpleNamespace(__cuda_array_interface__={"version": 2}), 0) == LEGACY_STREAM
