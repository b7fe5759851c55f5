"""Token ids of chunks that are on their way are named in frames that fit, whatever the layout."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvpool_native
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.one_way import NAMED_MAX, NameTokens
from kvpool.states import DRAM, PEER
from kvpool_client.connection.token_names import name_tokens
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.results import Hit

LONGEST = kvpool_native.TOKEN_IDS_MAX
CHUNKS, FIRST, END = 300, 3, 290  # on their way are those from FIRST to END, and what is between them


def _named(chunk_tokens: int, ranks: int, levels: bytes, keeps: bool = True) -> tuple[Hit, list[NameTokens]]:
    keys = KeyChain(chunk_tokens, lambda: tuple(bytes([rank]) * 32 for rank in range(ranks)))
    keys.extend(np.arange(CHUNKS * chunk_tokens))
    hit = Hit(CHUNKS, CHUNKS * chunk_tokens, levels, keys)
    sent: list[NameTokens] = []
    welcome = SimpleNamespace(keeps_tokens=keeps)
    session: Any = SimpleNamespace(welcome=welcome, notify=sent.append)
    name_tokens(session, hit, levels)
    return hit, sent


@pytest.mark.parametrize("chunk_tokens", [1, 16, LONGEST])
@pytest.mark.parametrize("ranks", [1, 64])
def test_what_is_on_its_way_is_named_once_and_in_order(chunk_tokens: int, ranks: int) -> None:
    levels = bytes([DRAM]) * FIRST + bytes([PEER]) * (END - FIRST) + bytes([DRAM]) * (CHUNKS - END)
    hit, sent = _named(chunk_tokens, ranks, levels)
    first = 0
    columns: list[list[bytes]] = [[] for _ in range(ranks)]
    for record in sent:
        m.encode(record, 0)  # asserts that it fits a frame
        count = len(record.tokens) // 4 // chunk_tokens
        assert len(record.keys) == count * ranks * 32 <= NAMED_MAX * ranks * 32
        for rank in range(ranks):
            columns[rank].append(record.keys[rank * count * 32 : (rank + 1) * count * 32])
        first += count
    assert first == END - FIRST
    assert b"".join(record.tokens for record in sent) == hit.keys.token_ids(range(FIRST, END))
    assert [b"".join(column) for column in columns] == [one[FIRST * 32 : END * 32] for one in hit.keys.columns()]


@pytest.mark.parametrize(
    ("chunk_tokens", "levels", "keeps"),
    [
        pytest.param(16, bytes([DRAM]) * CHUNKS, True, id="all of it is here"),
        pytest.param(16, bytes([PEER]) * CHUNKS, False, id="a daemon that keeps no token ids"),
        pytest.param(LONGEST + 1, bytes([PEER]) * CHUNKS, True, id="more ids than are kept of a chunk"),
    ],
)
def test_nothing_is_named_that_nobody_needs(chunk_tokens: int, levels: bytes, keeps: bool) -> None:
    assert _named(chunk_tokens, 1, levels, keeps)[1] == []
