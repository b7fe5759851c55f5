"""Names that wait for their chunks are bounded, go on where they stood, and are given up in the end."""

from collections.abc import Callable

import pytest

from kvpool.ids import NamespaceId
from kvpool.key_column import KEY_BYTES, KeyColumn
from kvpool.pool import pulled_names
from kvpool.pool.pulled_names import CHAINS_MAX, WAIT_S, PulledNames
from tests.rigs.clock import HandClock

KEYS = KeyColumn(b"".join(bytes([at]) * KEY_BYTES for at in range(4)))
TOKENS = bytes(range(16))  # four of one id each


class _Directory:
    """Gives those chunks their ids that have come, `come` of the first ones; those named before are passed over."""

    def __init__(self) -> None:
        self.come = 0
        self.named: dict[bytes, bytes] = {}

    def name_tokens(self, namespace: NamespaceId, keys: bytes, tokens: bytes) -> tuple[int, bool]:
        count = len(keys) // KEY_BYTES
        size = len(tokens) // count
        for at in range(count):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            if key[0] >= self.come:
                return at, True
            self.named.setdefault(key, tokens[at * size : (at + 1) * size])
        return count, False


class _Journal:
    is_behind = False

    def listen(self, listener: Callable[[], None], *_: object) -> None:
        self.listener = listener


class _Rig:
    def __init__(self) -> None:
        self.directory, self.journal, self.clock = _Directory(), _Journal(), HandClock(0)
        self.names = PulledNames(self.directory, self.journal, self.clock)  # type: ignore[arg-type]

    def add(self) -> None:
        self.names.add_run(NamespaceId(1), KEYS, TOKENS)


def test_a_chain_is_named_as_its_chunks_come_and_after_the_journal_has_them() -> None:
    rig = _Rig()
    rig.add()
    rig.directory.come, rig.journal.is_behind = 3, True
    rig.names.name_arrived()
    rig.journal.is_behind = False
    rig.journal.listener()
    assert b"".join(rig.directory.named.values()) == TOKENS[:12]
    rig.directory.come = 4
    rig.names.name_arrived()
    assert b"".join(rig.directory.named.values()) == TOKENS
    assert len(rig.names) == 0


def test_what_never_comes_is_given_up() -> None:
    rig = _Rig()
    rig.add()
    rig.clock.ns = int(WAIT_S * 1e9) + 1
    rig.names.name_arrived()
    assert len(rig.names) == 0


@pytest.mark.parametrize(("bytes_max", "most"), [(1 << 20, CHAINS_MAX), (3 * len(TOKENS), 3)], ids=["chains", "bytes"])
def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, bytes_max: int, most: int) -> None:
    monkeypatch.setattr(pulled_names, "BYTES_MAX", bytes_max)
    rig = _Rig()
    for _ in range(most + 2):
        rig.add()
    assert len(rig.names) == most
    rig.directory.come = 3
    rig.names.name_arrived()
    assert len(rig.names) == most
    rig.directory.come = 4
    rig.names.name_arrived()
    assert len(rig.names) == 0
    rig.directory.come = 0
    for _ in range(most + 2):
        rig.add()
    assert len(rig.names) == most
