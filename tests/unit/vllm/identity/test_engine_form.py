"""The form of a block that the vLLM connector derives: releases that agree share, others never do."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool_client.vllm.identity.engine_form import cache_code, engine_form
from tests.rigs.vllm import fake_vllm

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

import torch

pytestmark = pytest.mark.torch


@dataclass
class FullAttentionSpec:
    """The kind of spec that can be tried."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 16
    dtype: Any = torch.float32


class MLAAttentionSpec(FullAttentionSpec):
    """A kind that cannot."""


SOURCES = {
    "__init__.py": "",
    "v1/kv_cache_layout.py": "class KVCacheLayout:\n    LBHNC = (0, 1, 2, 3, 4)\n",
    "v1/attention/backends/flash.py": (
        "class Flash:\n    def supported_kv_cache_layouts(self):\n        return ['LBHNC']\n"
        "    def forward(self, query):\n        return query\n"
    ),
}


def config(device: str = "cpu", backend: str | None = None) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        attention_config=SimpleNamespace(backend=backend),
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The form that a release of vLLM has, whose operation packs blocks so."""

    def form(version: str, pack: Callable[[Any], Any] | None, spec: Any = FullAttentionSpec()) -> str:  # noqa: B008 - never changed
        def fill(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: str, *, kv_cache_dtype: str) -> None:
            assert (isa, kv_cache_dtype) == ("vec", "auto")
            keys[0].copy_(pack(key).transpose(0, 1))  # type: ignore[misc]  # there where it is called
            values[0].copy_(value.transpose(0, 1))

        operations, backend = ModuleType("vllm._custom_ops"), ModuleType("vllm.v1.attention.backends.cpu_attn")
        if pack is not None:
            operations.cpu_attn_reshape_and_cache = fill  # type: ignore[attr-defined]
        backend._get_attn_isa = lambda *_: "vec"  # type: ignore[attr-defined]
        for name in ("vllm.v1.attention", "vllm.v1.attention.backends"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, backend.__name__, backend)
        monkeypatch.setitem(sys.modules, operations.__name__, operations)
        monkeypatch.setattr(sys.modules["vllm"], "_custom_ops", operations, raising=False)
        monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
        return engine_form(config(), spec)

    with fake_vllm.installed():
        yield form


def test_two_releases_that_pack_alike_share(release: Callable[..., str]) -> None:
    assert release("0.32.0", lambda key: key) == release("0.32.1", lambda key: key.clone())


def test_two_releases_whose_blocks_differ_never_share(release: Callable[..., str]) -> None:
    plain = release("0.32.0", lambda key: key)
    assert release("0.32.0", lambda key: key.flip(0)) != plain
    assert release("0.33.0", lambda key: key.flip(2)) != plain


def test_without_an_operation_to_try_only_one_release_shares(release: Callable[..., str]) -> None:
    forms = {release("0.32.0", None), release("0.32.1", None), release("0.32.0", lambda key: key)}
    assert len(forms) == 3
    assert release("0.32.0", None) == release("0.32.0", None)
    assert release("0.32.0", lambda key: key, MLAAttentionSpec()) not in forms - {release("0.32.0", None)}


def test_another_type_of_items_is_another_form(release: Callable[..., str]) -> None:
    half = FullAttentionSpec(dtype=torch.float16)
    assert release("0.32.0", lambda key: key, half) != release("0.32.0", lambda key: key)


def write_package(directory: Path, **changed: str) -> Path:
    for name, source in {
        **SOURCES,
        **{name.replace("__", "/") + ".py": text for name, text in changed.items()},
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(source)
    return directory


FLASH = SOURCES["v1/attention/backends/flash.py"]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        ({"v1__attention__backends__flash": FLASH + "# written otherwise\n"}, True),
        ({"v1__attention__backends__flash": FLASH.replace("return query", "return -query")}, True),
        ({"v1__attention__backends__plain": "def forward():\n    return 1\n"}, True),
        ({"v1__attention__backends__flash": FLASH.replace("LBHNC", "LBNHC")}, False),
        ({"v1__kv_cache_layout": "class KVCacheLayout:\n    LBHNC = (0, 2, 1, 3, 4)\n"}, False),
        ({"v1__attention__backends__more": "def do_kv_cache_update():\n    return 1\n"}, False),
    ],
    ids=["copy", "comment", "forward", "other-file", "layouts-of-a-backend", "order-of-a-layout", "new-backend"],
)
def test_the_code_of_a_backend_decides_where_no_block_can_be_filled(
    changed: dict[str, str], is_same: bool, tmp_path: Path
) -> None:
    base = cache_code(write_package(tmp_path / "base"))
    assert (cache_code(write_package(tmp_path / "other", **changed)) == base) == is_same


def test_devices_and_backends_have_different_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = write_package(tmp_path / "vllm")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    spec: Any = FullAttentionSpec()
    forms = [engine_form(config("cuda", name), spec) for name in ("FLASH", "FLASHINFER")]
    assert forms[0] != forms[1]
    assert all(form.startswith("cuda/") and cache_code(package) in form for form in forms)
