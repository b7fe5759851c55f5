"""Keys of docs/layouts.md, as a program: its keys equal those of a KeyChain, for any fields of the root."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.keys import domain_key, root_key
from kvpool.layout import Layout
from kvpool.layouts.groups import KINDS, GroupRole
from kvpool_client.key_chain import KeyChain

PAGE = Path(__file__).parents[3] / "docs" / "layouts.md"
SHAPE: dict[str, Any] = {"layers": 2, "kv_heads": 1, "head_dim": 8, "chunk_tokens": 32, "dtype": "float16"}


@pytest.mark.parametrize(
    ("adapter", "salt", "secret", "more"),
    [
        ("", b"", b"", {}),
        ("sql-lora", b"tenant", b"", {}),
        ("", b"", b"a secret", {"rank": 1, "world": 4}),
        ("", b"", b"", {"planes": 1, "block_tokens": 16, "format": "vllm/x"}),
        ("", b"", b"", {"rank": 1, "world": 2, "stages": (1, 2)}),
        ("", b"", b"", {"head_dim": 32, "summaries": "clusters7"}),
        ("", b"", b"", {"kv_heads": 8, "head_groups": 4}),
        ("", b"", b"", {"kv_heads": 2, "head_groups": 2, "rank": 1, "world": 2, "stages": (1, 2)}),
        ("", b"", b"", {"head_dim": 32, "rank": 1, "world": 2, "stages": (1, 2), "summaries": "mean"}),
        ("", b"", b"", {"group": GroupRole("window", 100, 1)}),
        ("lora", b"t", b"", {"group": GroupRole("state", 0, 0), "stages": (2, 3), "world": 2}),
        ("", b"", b"", {"group": GroupRole("full", 0, 0), "head_dim": 32, "summaries": "mean"}),
    ],
)
def test_the_page_computes_the_same_keys(adapter: str, salt: bytes, secret: bytes, more: dict[str, Any]) -> None:
    found = re.search(r"\n## Keys\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    page: dict[str, Any] = {}
    exec(found[1], page)
    tokens = np.random.default_rng(3).integers(0, 50_000, 100).tolist()
    layout = Layout(**{**SHAPE, **more})
    root = root_key(domain_key(secret), model="m@r", adapter=adapter, salt=salt, layout=layout)
    chain = KeyChain(32, lambda: (root,))
    chain.extend(tokens)
    expected = [chain[at] for at in range(len(chain))]
    assert len(expected) == 3
    if role := more.get("group"):
        more = {**more, "group": (KINDS.index(role.kind), role.window, role.number)}
    fingerprint = page["fingerprint"](**{**SHAPE, **more})
    assert page["chunk_keys"](tokens, 32, "m@r", fingerprint, adapter, salt, secret) == expected
